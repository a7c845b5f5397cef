"""The command sinklab trigger: its table, JSON, files, what cannot be learned, and one line for what cannot be."""

from __future__ import annotations

import json

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.results.table import read_run, read_table

QUICK = ["--cap", "5", "--seeds", "0..1"]


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, ["trigger", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, result.output
    return result


def test_table_and_files(tmp_path):
    out = tmp_path / "out"
    result = run("--operation", "softmax,relu:uncounted=0,softmax_plus_one", *QUICK, "--out", out)
    lines = result.stdout.splitlines()
    assert " ".join(lines[0].split()) == "operation seed steps largest error on BOS, mean least bound null mass trigger on BOS"
    assert [line.split()[:5] for line in lines[1:5]] == [
        [name, seed, "5,", "did", "not"] for name in ("softmax", "softmax_plus_one") for seed in "01"
    ]
    assert lines[6] == (
        "relu:uncounted=0 was not trained: each weight depends on its own score, and none is divided by i - 1 of i visible "
        "keys, so that no mean over i - 1 tokens comes out; every choice of maps is off by 0.0333 or more somewhere (--anyway "
        "trains it)"
    )
    assert lines[-1] == f"table  {out / 'table.parquet'}"
    assert result.stderr == ""
    table = read_table(out / "table.parquet")
    assert set(table["operation"]) == {"softmax", "softmax_plus_one"}
    maps = table[(table["metric"] == "weight_mean") & (table["operation"] == "softmax") & (table["seed"] == 1)]
    assert len(maps) == 16 * 17 // 2
    assert maps.groupby("query_position")["value"].sum().tolist() == pytest.approx([1.0] * 16, abs=1e-5)
    # Next to untrained, scores are about 0 and rows uniform: the first key has 1/2, 1/3, …, without the row of the trigger.
    expected = sum(1 / (query + 1) for query in range(1, 16) if query != 7) / 14
    (on_bos,) = table[(table["metric"] == "bos_weight_mean") & (table["operation"] == "softmax") & (table["seed"] == 1)][
        "value"
    ]
    assert on_bos == pytest.approx(expected, abs=1e-3)
    assert read_run(out)["config"]["learning_rate"] == 1e-3
    assert {path.name for path in out.glob("*.png")} == {
        f"{name}-seed{seed}.png" for name in ("softmax", "softmax_plus_one") for seed in (0, 1)
    }


def test_json_is_the_runs():
    result = run("--operation", "softmax", "--layers", 2, "--heads", 3, *QUICK, "--json")
    record = json.loads(result.stdout)
    assert record["cannot"] == []
    assert [entry["seed"] for entry in record["runs"]] == [0, 1]
    first = record["runs"][0]
    assert {"operation", "layers", "heads", "seed", "steps", "max_error", "bos_weight_mean", "bos_weight_min"} <= set(first)
    assert (first["operation"], first["layers"], first["heads"], first["steps"]) == ("softmax", 2, 3, 5)
    assert first["outcome"] == "cap"
    by_head = first["head_bos_weight_mean"]
    assert [len(row) for row in by_head] == [3, 3]
    layer, head = first["strongest_head"]
    assert first["bos_weight_mean"] == by_head[layer][head] == max(max(row) for row in by_head)
    assert first["bos_weight_min"] == first["head_bos_weight_min"][layer][head]


def test_several_heads_are_counted():
    result = run("--layers", 2, "--heads", 2, "--operation", "softmax", "--cap", 1, "--seeds", 0)
    heading, row = result.stdout.splitlines()
    assert heading.split()[-3:] == ["heads", "that", "sink"]
    assert row.split()[-3:] == ["0", "of", "4"]


def test_relu_is_the_one_of_the_paper():
    (entry,) = json.loads(run("--operation", "relu", "--cap", 1, "--seeds", 0, "--json").stdout)["runs"]
    assert entry["operation"] == "relu"
    assert entry["settings"]["uncounted"] == 1


def test_anyway_trains_what_cannot_be():
    (entry,) = json.loads(run("--operation", "sigmoid", "--anyway", "--cap", 2, "--seeds", 0, "--json").stdout)["runs"]
    assert (entry["operation"], entry["outcome"], entry["bos_weight_bound"]) == ("sigmoid", "cap", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operation", "sofmax"], "no operation is called 'sofmax'. Did you mean 'softmax'?"),
        (["--operation", "relu:counted=1"], "operation 'relu' has no setting 'counted'"),
        (["--operation", "softmax:("], "cannot be read; write name or name:setting=value,setting=value"),
        (["--operation", ","], "0 operations, 3 seeds and 1,000 samples"),
        (["--position", "16"], "position 16 must be in 2 … 15, counted from 0"),
        (["--position", "1"], "position 1 must be in 2 … 15"),
        (["--length", "3"], "length 3 must be at least 4"),
        (["--width", "3"], "width 3 must be at least 4"),
        (["--heads", "0"], "heads 0 must be at least 1"),
        (["--cap", "0"], "cap 0 must be at least 1"),
        (["--seeds", "2..1"], "expected seeds such as 0..4"),
        (["--triggers", "14"], "14 triggers in 16 tokens; expected 1 … 13"),
        (["--triggers", "0"], "0 triggers in 16 tokens"),
        (["--positions", "rotari"], "no position is called 'rotari'. Did you mean 'rotary'?"),
        (["--positions", "rotary", "--width", "7"], "head_dim 7 must be even"),
        (["--start", "zero"], '"zero" for --start. Choose from'),
        (["--start", "construction", "--heads", "2"], "constructions are known for one layer with one head"),
        (["--start", "construction", "--operation", "gated"], "constructions are known for softmax, and for relu"),
        (["--start", "construction", "--noise", "-1"], "noise -1.0 must be a number from 0"),
        (["--noise", "0.1"], "noise 0.1 is put on a construction, and the start is random"),
        (["--resume"], "--resume is about an output directory; give one with --out"),
        (["--overwrite"], "--overwrite is about an output directory"),
        (["--tolerance", "0"], "tolerance 0.0 must be a positive number"),
        (["--target", "all"], '"all" for --target. Choose from'),
        (["--operation", "sigmoid"], "operation 'sigmoid' cannot do the task: each weight depends on its own score"),
        (["--no-bos", "--operation", "softmax"], "without BOS there is no token that could carry nothing"),
    ],
)
def test_refusals(arguments, message):
    result = run(*arguments, status=2)
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "exists" in run("--out", tmp_path, "--cap", 1, status=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
