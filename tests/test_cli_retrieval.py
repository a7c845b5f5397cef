"""The command sinklab retrieval: its table, JSON and files, and what it refuses before any training."""

from __future__ import annotations

import json

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.results.table import read_run, read_table

QUICK = ["--cap", "3", "--seeds", "0..1"]


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, ["retrieval", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, result.output
    return result


def test_table_and_files(tmp_path):
    out = tmp_path / "out"
    lines = run(*QUICK, "--out", out).stdout.splitlines()
    assert lines[0].split()[:5] == ["operation", "seed", "steps", "largest", "error"]
    assert [line.split()[:5] for line in lines[1:5]] == [
        [name, seed, "3,", "did", "not"] for name in ("softmax", "relu:power=0") for seed in "01"
    ]
    assert lines[-1] == f"table  {out / 'table.parquet'}"
    table = read_table(out / "table.parquet")
    assert set(table["operation"]) == {"softmax", "relu:power=0"}
    # Next to untrained, scores are about 0 and rows uniform: BOS has 1/2, 1/3, … of the tokens before the trigger at 7.
    expected = sum(1 / (query + 1) for query in range(1, 7)) / 6
    chosen = table[(table["metric"] == "before_bos_mean") & (table["operation"] == "softmax")]["value"]
    assert chosen.tolist() == pytest.approx([expected, expected], abs=1e-2)
    assert read_run(out)["config"]["target"] == "value"
    assert {path.name for path in out.iterdir()} == {"table.parquet", "summary.json", "store", "run.json"}


def test_json_is_the_runs():
    record = json.loads(run("--operation", "softmax", "--target", "token", "--position", 15, *QUICK, "--json").stdout)
    assert [(one["seed"], one["outcome"], one["target"]) for one in record["runs"]] == [
        (0, "cap", "token"),
        (1, "cap", "token"),
    ]
    assert record["runs"][0]["behind_bos_mean"] is None  # nothing stands behind a trigger at the end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operation", "relu"], "operation 'relu:uncounted=1' cannot do the task: its weights are divided by the number of"),
        (["--operation", "relu"], "off by 0.2 or more somewhere. relu:power=0 is not divided"),
        (["--operation", "relu:uncounted=0"], "off by 0.143 or more somewhere"),
        (["--length", "3"], "length 3"),
        (["--keys", "2"], "keys"),
        (["--position", "1"], "position 1"),
        (["--cap", "0"], "cap 0 must be at least 1"),
        (["--operation", "sofmax"], "Did you mean 'softmax'?"),
    ],
)
def test_what_is_refused(arguments, message):
    result = run(*arguments, status=2)
    assert message in result.output
    assert result.output.startswith("error: ")
