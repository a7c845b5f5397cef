"""Two commands on one folder: the second is refused, the first is whole; what a killed one leaves is no obstacle."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sinklab import audit, measure
from sinklab.errors import InputError
from sinklab.results.table import read_run, read_table

HELD = """
import importlib, pathlib, sys, time
from sinklab import {command}
module = importlib.import_module({module!r})
checkpoint, out, marker, go = sys.argv[1:]
real = module.run_probes
def held(*arguments, **options):
    while not pathlib.Path(go).exists():
        pathlib.Path(marker).touch()
        time.sleep(0.02)
    return real(*arguments, **options)
module.run_probes = held
{command}(checkpoint, corpus="random_tokens", seq_len=8, samples=2, out=pathlib.Path(out), {options})
"""

COMMANDS = {
    "audit": (audit, "sinklab.studies.audit.measurement", {"cache": False}),
    "measure": (measure, "sinklab.studies.measure.probing", {"probes": ["entropy"]}),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_second_is_refused_and_the_first_is_whole(checkpoint, tmp_path, command):
    function, module, options = COMMANDS[command]
    given = {"corpus": "random_tokens", "seq_len": 8, "samples": 2, "out": tmp_path / "out", **options}
    marker, go = tmp_path / "marker", tmp_path / "go"
    code = HELD.format(command=command, module=module, options=", ".join(f"{key}={value!r}" for key, value in options.items()))

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, (checkpoint, tmp_path / "out", marker, go))])
        deadline = time.monotonic() + 300
        while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return process

    killed = start()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    marker.unlink()
    assert not (tmp_path / "out").exists()

    first = start()
    for overwrite in (False, True):
        with pytest.raises(InputError, match=rf"out is in use by process {first.pid} on"):
            function(str(checkpoint), **given, overwrite=overwrite)
    go.touch()
    assert first.wait(timeout=300) == 0
    assert read_run(tmp_path / "out")["kind"] == command
    assert set(read_table(tmp_path / "out" / "table.parquet")["run_id"]) == {read_run(tmp_path / "out")["run_id"]}
    assert {path.name for path in Path(tmp_path).iterdir()} == {"out", "go", "marker"}
