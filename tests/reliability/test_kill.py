"""A few seeded kills of a command, and that the harness of all of them forgets no command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
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


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two folders of one result with another identity and another time."""
    for name in ("one", "other"):
        table = make_table([{"metric": LOSS, "value": 1.0, "count": 2}, {"metric": LOSS, "value": 2.0}], run_id=name)
        write_table(table, tmp_path / name / "out" / "table.parquet")
        write_json({"run_id": name, "seconds": len(name), "kept": [1, 2]}, tmp_path / name / "out" / "run.json")
    return [tmp_path / "one", tmp_path / "other"]


def test_identities_and_times_are_no_differences(folders):
    assert list(differences(*folders, ())) == []
    assert list(half_states(folders[0])) == []


def test_what_is_different_is_said(folders):
    one, other = folders
    (other / "out" / ".table.lock-that-stays").touch()
    write_json({"run_id": "other", "seconds": 3, "kept": [1, 3]}, other / "out" / "run.json")
    table = pd.read_parquet(other / "out" / "table.parquet")
    write_table(table.assign(value=[1.0, 2.0000000000000004]), other / "out" / "table.parquet")
    assert list(differences(one, other, ())) == [
        "not in an undisturbed run: out/.table.lock-that-stays",
        "out/run.json: kept[1] is '3', and '2' undisturbed",
        "out/table.parquet: value differs in 1 rows, first of loss",
    ]
    write_table(table[:1], other / "out" / "table.parquet")
    assert "out/table.parquet: 1 rows, and 2 undisturbed" in list(differences(one, other, ()))
    (other / "out" / "run.json").unlink()
    assert "missing: out/run.json" in list(differences(one, other, ()))


def test_half_a_folder_is_seen(folders):
    one, other = folders
    (one / "out" / "run.json").write_text((other / "out" / "run.json").read_text())
    assert list(half_states(one)) == ["out/table.parquet is of the run one, and run.json beside it of other"]
    (one / "out" / "run.json").write_text("{")
    (one / "out" / "table.parquet").write_bytes((other / "out" / "table.parquet").read_bytes()[:200])
    half, table = half_states(one)
    assert half.startswith("out/run.json is half there: ")
    assert table.startswith("out/table.parquet is half there: ")
