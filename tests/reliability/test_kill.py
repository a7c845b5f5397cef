"""A few seeded kills of a command, and that the harness of all of them forgets no command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
from tests.reliability.kill import ROOT, differences, forgotten, half_states, writers

from sinklab.cli.commands import find_commands
from sinklab.results.metric import LOSS
from sinklab.results.table import make_table, write_json, write_table


def test_every_command_that_writes_is_killed():
    assert forgotten() == set()
    assert find_commands().keys() - writers() == {"card", "claims", "list", "show"}


def test_a_few_kills(tmp_path):
    line = [sys.executable, "-m", "tests.reliability.kill", "--command", "trigger", "--kills", "3"]
    done = subprocess.run(
        [*line, "--record", str(tmp_path / "kill.json")],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kills = json.loads((tmp_path / "kill.json").read_text())["kills"]
    assert [(kill["command"], kill["signal"]) for kill in kills] == [
        ("trigger", signal) for signal in ("SIGKILL", "SIGTERM", "SIGINT")
    ]


def test_what_is_different_or_half_there_is_said(tmp_path: Path):
    """Of two folders of one result, identities and times are no differences."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        table = make_table([{"metric": LOSS, "value": 1.0, "count": 2}, {"metric": LOSS, "value": 2.0}], run_id=folder.name)
        write_table(table, folder / "out" / "table.parquet")
        write_json({"run_id": folder.name, "seconds": len(folder.name), "kept": [1, 2]}, folder / "out" / "run.json")
    assert list(differences(one, other)) == list(half_states(one)) == []
    (other / "out" / ".table.lock-that-stays").touch()
    write_json({"run_id": "other", "seconds": 3, "kept": [1, 3]}, other / "out" / "run.json")
    write_table(
        pd.read_parquet(other / "out" / "table.parquet").assign(value=[1.0, 2.0000000000000004]),
        other / "out" / "table.parquet",
    )
    assert list(differences(one, other)) == [
        "not in an undisturbed run: out/.table.lock-that-stays",
        "out/run.json: it differs",
        "out/table.parquet: it differs",
    ]
    (one / "out" / "run.json").write_text((other / "out" / "run.json").read_text())
    assert list(half_states(one)) == ["out/table.parquet is of the run one, and run.json beside it of other"]
    (one / "out" / "run.json").write_text("{")
    (one / "out" / "table.parquet").write_bytes((other / "out" / "table.parquet").read_bytes()[:200])
    half, table = half_states(one)
    assert half.startswith("out/run.json is half there: ")
    assert table.startswith("out/table.parquet is half there: ")
