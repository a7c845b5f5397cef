"""Two commands on one folder: the second is refused, the first is whole; what a killed one leaves is no obstacle."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from sinklab import audit, measure
from sinklab.errors import InputError
from sinklab.results.table import read_run, read_table

COMMANDS = {
    "audit": (audit, "sinklab.studies.audit.measurement", {"cache": False}),
    "measure": (measure, "sinklab.studies.measure.probing", {"probes": ["entropy"]}),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_second_is_refused_and_the_first_is_whole(checkpoint, tmp_path, command):
    function, module, options = COMMANDS[command]
    given = {"corpus": "random_tokens", "seq_len": 8, "samples": 2, "out": tmp_path / "out", **options}
    marker, go = tmp_path / "marker", tmp_path / "go"

    def held() -> None:
        torch.set_num_threads(1)  # the threads that this process has computed with are not there after the fork
        real = (home := importlib.import_module(module)).run_probes

        def run_probes(*arguments, **options):
            while not go.exists():
                marker.touch()
                time.sleep(0.02)
            return real(*arguments, **options)

        home.run_probes = run_probes
        function(str(checkpoint), **given)

    def start() -> multiprocessing.Process:
        process = multiprocessing.get_context("fork").Process(target=held)  # a process of its own, without its imports
        process.start()
        deadline = time.monotonic() + 300
        while not marker.exists() and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return process

    killed = start()
    killed.kill()
    killed.join()
    marker.unlink()
    assert not (tmp_path / "out").exists()

    first = start()
    for overwrite in (False, True):
        with pytest.raises(InputError, match=rf"out is in use by process {first.pid} on"):
            function(str(checkpoint), **given, overwrite=overwrite)
    go.touch()
    first.join(timeout=300)
    assert first.exitcode == 0
    assert read_run(tmp_path / "out")["kind"] == command
    assert set(read_table(tmp_path / "out" / "table.parquet")["run_id"]) == {read_run(tmp_path / "out")["run_id"]}
    assert {path.name for path in Path(tmp_path).iterdir()} == {"out", "go", "marker"}
