"""The command sinklab trigger, for both tasks: its table, JSON, files, and one line for what cannot be."""

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
    text = " ".join(result.stdout.split())
    assert "relu:uncounted=0 was not trained: every choice of maps is off by 0.0333 or more." in text
    assert (
        "none is divided by i - 1 of i visible keys, so that no mean over i - 1 tokens comes out (--anyway trains it)" in text
    )
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


def test_retrieval(tmp_path):
    out = tmp_path / "out"
    lines = run("--task", "retrieval", "--cap", 3, "--seeds", "0..1", "--out", out).stdout.splitlines()
    assert [line.split()[:5] for line in lines[1:5]] == [
        [name, seed, "3,", "did", "not"] for name in ("softmax", "relu:power=0") for seed in "01"
    ]
    table = read_table(out / "table.parquet")
    # Next to untrained, scores are about 0 and rows uniform: BOS has 1/2, 1/3, … of the tokens before the trigger at 7.
    expected = sum(1 / (query + 1) for query in range(1, 7)) / 6
    chosen = table[(table["metric"] == "before_bos_mean") & (table["operation"] == "softmax")]["value"]
    assert chosen.tolist() == pytest.approx([expected, expected], abs=1e-2)
    config = read_run(out)["config"]
    assert (config["task"], config["target"]) == ("retrieval", "value")
    assert {path.name for path in out.iterdir()} == {"table.parquet", "summary.json", "store", "run.json"}
    last = json.loads(run("--task", "retrieval", "--position", 15, "--cap", 1, "--seeds", 0, "--json").stdout)["runs"][0]
    assert last["behind_bos_mean"] is None  # nothing stands behind a trigger at the end


def test_anyway_trains_what_cannot_be():
    (entry,) = json.loads(run("--operation", "sigmoid", "--anyway", "--cap", 2, "--seeds", 0, "--json").stdout)["runs"]
    assert (entry["operation"], entry["outcome"], entry["bos_weight_bound"]) == ("sigmoid", "cap", None)


RETRIEVAL = ["--task", "retrieval"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operation", "sofmax"], "no operation is called 'sofmax'. Did you mean 'softmax'?"),
        (["--operation", "relu:counted=1"], "operation 'relu' has no setting 'counted'"),
        (["--operation", ","], "0 operations, 3 seeds and 1,000 samples"),
        (["--start", "construction", "--heads", "2"], "constructions are known for one layer with one head"),
        (["--start", "construction", "--operation", "gated"], "constructions are known for softmax, and for relu"),
        (["--resume"], "--resume is about an output directory; give one with --out"),
        (["--operation", "sigmoid"], "operation 'sigmoid' cannot do the task: each weight depends on its own score"),
        (["--no-bos", "--operation", "softmax"], "without BOS there is no token that could carry nothing"),
        (["--keys", "9"], "--keys 9 is an option of the other task"),
        ([*RETRIEVAL, "--layers", "2"], "--layers 2 is an option of the other task"),
        ([*RETRIEVAL, "--operation", "relu"], "off by 0.2 or more somewhere. relu:power=0 is not divided"),
        ([*RETRIEVAL, "--operation", "relu:uncounted=0"], "off by 0.143 or more somewhere"),
        ([*RETRIEVAL, "--keys", "2"], "keys"),
    ],
)
def test_refusals(arguments, message):
    result = run(*arguments, status=2)
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
