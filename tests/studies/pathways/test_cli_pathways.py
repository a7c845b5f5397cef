"""The command sinklab pathways: its table, JSON and status, and what it refuses before any training."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.results.run import Result
from sinklab_claims.pathways import compare
from sinklab_claims.pathways.judging import judged
from sinklab_claims.pathways.show import show

GOOD = {"held_out_loss": 2.0, "effective_sink_rate": 0.0, "sink_rate": 0.0, "hidden_ratio": 1.0} | {
    "window_gap": 0.001,
    "int8_gap": 0.002,
}


def invoke(*arguments):
    return CliRunner().invoke(app, ["pathways", *(str(argument) for argument in arguments)])


@pytest.fixture
def made(monkeypatch):
    """A comparison of numbers made by hand, and the options it was asked with."""
    asked = {}

    def run(operations, **options):
        asked.update(options, operations=operations)
        numbers = {seed: {"softmax": {**GOOD, "effective_sink_rate": 30.0}, "softpick": GOOD} for seed in range(6)}
        rows = judged(["softmax", "softpick"], numbers)
        summary = {
            "rows": [row.to_dict() for row in rows],
            "cannot": {"sigmoid": "why"},
            "errors": asked.get("fail", []),
        }
        return Result(summary, pd.DataFrame(), {"kind": "pathways"}, options["out"], shows=show)

    monkeypatch.setattr(compare, "run_pathways", run)
    return asked


def test_the_table(made):
    result = invoke("--operations", "softpick,sigmoid:normalize=true", "--seeds", "0..1", "--out", "there")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Low-distortion: softpick, of 1 operations beside softmax.")
    softmax, softpick = (line.split() for line in result.stdout.splitlines() if line.startswith("soft"))
    assert (softmax[1], softpick[1:3]) == ("reference", ["yes", "equivalent:"])
    assert "sigmoid, trigger task" in result.stdout
    assert made["operations"] == [{"name": "softpick"}, {"name": "sigmoid", "normalize": True}]
    assert made["seeds"] == [0, 1]
    assert made["store"] == Path("sinklab-claims")
    assert made["base"] is None


def test_the_seeds_of_the_scale(made):
    assert invoke("--base", "bos").exit_code == 0
    assert (made["seeds"], made["base"]) == (list(range(8)), "bos")
    assert invoke("--scale", "small").exit_code == 0
    assert (made["seeds"], made["rate"]) == ([0, 1, 2], None)
    assert invoke("--scale", "small", "--rate", "0.5").exit_code == 0
    assert made["rate"] == 0.5


def test_json_is_all_there_is_on_stdout(made):
    printed = json.loads(invoke("--json").stdout)
    assert printed["cannot"] == {"sigmoid": "why"}
    softpick = printed["rows"][1]
    assert softpick["low_distortion"] == "yes"
    assert softpick["bounds"]["window"]["expected"] == "less than 0.02"
    assert softpick["numbers"]["held_out_loss"] == {
        "mean": 2.0, "low": 2.0, "high": 2.0, "count": 6, "method": "exact, of the median",
    }  # fmt: skip


def test_failures_are_told_and_give_status_1(made):
    made["fail"] = ["cell x: it died"]
    result = invoke()
    assert result.exit_code == 1
    assert "failed: cell x: it died" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operations", "softpik"], "Did you mean 'softpick'?"),
        (["--operations", "softpick,softpick"], "the comparison has softpick twice"),
        (["--operations", "relu:colour=3"], "colour"),
        (["--seeds", "2..0"], "expected seeds such as 0..4"),
        (["--seeds", "1000"], "seed 1000 is one on which learning rates are chosen"),
        (["--seeds", "1,1"], "none twice"),
        (["--scale", "60m", "--base", "bos"], "scale 60m has the base no-bos"),
        (["--rate", "-1"], "--rate is -1; expected a learning rate over that of the scale, such as 0.5"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, tmp_path):
    result = invoke(*arguments, "--out", tmp_path / "out", "--store", tmp_path / "store")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
