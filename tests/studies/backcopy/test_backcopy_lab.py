"""run_backcopy() and the command sinklab backcopy: records, table, figure, taking up a run, one line for what cannot be."""

from __future__ import annotations

import json
import math

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.errors import ConfigurationError, InputError
from sinklab.operations.relu import Relu
from sinklab.operations.softmax import Softmax
from sinklab.results.table import read_run, read_table
from sinklab.studies.backcopy.evaluation import BY_HEAD, BY_LAYER
from sinklab.studies.backcopy.lab import run_backcopy
from sinklab.studies.backcopy.record import _above
from sinklab.studies.backcopy.training import BackcopySettings

SETTINGS = BackcopySettings(width=16, length=12, batch=4, steps=6, evaluations=3, heads=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Paragraphs of random words: any bigram occurs."""
    import random

    generator = random.Random(0)
    words = [
        "".join(generator.choices("etaoinshrdlcumwfgypbvkjxqz", range(36, 10, -1), k=generator.randint(1, 6)))
        for _ in range(4000)
    ]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n".join(" ".join(words[start : start + 40]) for start in range(0, 4000, 40)))
    return path


@pytest.fixture
def lab(text):
    def call(operations, seeds=(0,), **options):
        settings = BackcopySettings(**{**SETTINGS.__dict__, "characters": 11, **options.pop("fields", {})})
        return run_backcopy(operations, seeds, settings, corpus=str(text), samples=options.pop("samples", 8), **options)

    return call


@pytest.mark.parametrize(("mean", "half", "state"), [(0.7, 0.1, True), (0.3, 0.1, False), (0.55, 0.1, None), (0.45, 0.1, None)])
def test_a_state_that_the_samples_leave_open_is_none(mean, half, state):
    """A mean of 0.55 with an interval from 0.45 to 0.65 is no head that is not active."""
    assert _above({"weight": mean, "weight_interval": half}, "weight") is state


def test_records_and_files(lab, tmp_path):
    out = tmp_path / "out"
    result = lab([Softmax(), Relu(power=0.0)], (0, 1), layers=[1, 2], optimizers=["adamw", "sgd"], out=out)
    runs, chain = result.summary["runs"], result.record["chain"]
    assert chain["characters"][0] == " "
    assert [(run["operation"], run["optimizer"], run["layers"], run["seed"]) for run in runs] == [
        (operation, optimizer, layers, seed)
        for operation in ("softmax", "relu:power=0")
        for optimizer in ("adamw", "sgd")
        for layers in (1, 2)
        for seed in (0, 1)
    ]
    run = runs[2]
    assert run["learning_rate"] == 1e-3
    assert run["floor"] == chain["floor"]
    assert [entry["layer"] for entry in run["by_layer"]] == [-1, 0, 1]
    assert [(entry["layer"], entry["head"]) for entry in run["by_head"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    copying = max(run["by_head"], key=lambda head: head["knock_out_trigger_excess"])
    assert run["copy_head"] == [copying["layer"], copying["head"]]
    assert all(run[name] == copying[name] for name in BY_HEAD)
    assert copying["active"] == (copying["previous_weight_trigger"] - copying["previous_weight_trigger_interval"] > 0.5)
    assert copying["dormant"] == (copying["bos_weight"] - copying["bos_weight_interval"] > 0.5)
    assert runs[-1]["active"] is runs[-1]["dormant"] is None  # ReLU
    assert run["residual_peak"] == max(entry["residual_ratio"] for entry in run["by_layer"][1:])
    assert run["residual_peak_inside"] == run["by_layer"][1]["residual_ratio"]
    assert runs[0]["residual_peak_inside"] is None
    assert [step for step, _ in run["loss"]] == [1, 2, 3, 4, 5, 6]
    assert [point["step"] for point in run["curve"]] == [0, 2, 6]
    assert json.loads((out / "summary.json").read_text())["runs"] == runs
    record = read_run(out)
    assert record["kind"] == "backcopy"
    assert record["chain"]["triggers"] == chain["characters"][:3]
    assert (out / "curves.png").stat().st_size > 10_000
    table = read_table(out / "table.parquet")
    assert set(table["metric"]) == {
        *BY_HEAD,
        *BY_LAYER,
        *("trigger_excess", "other_excess", "knock_out_trigger_excess", "knock_out_other_excess", "loss"),
    }
    chosen = table[(table["model"] == "backcopy 2x2 adamw") & (table["operation"] == "softmax") & (table["seed"] == 0)]
    (value,) = chosen[(chosen["metric"] == "value_ratio") & (chosen["layer"] == 1) & (chosen["head"] == 1)].query(
        "step.isna()"
    )["value"]
    assert value == run["by_head"][3]["value_ratio"]


def test_what_is_done_is_not_done_again(lab, tmp_path):
    out = tmp_path / "out"
    first = lab([Softmax()], (0,), out=out)
    (done,) = (out / "store").glob("softmax-*.json")
    stamp = done.stat().st_mtime_ns
    (out / "run.json").unlink()  # as if it had been stopped before the end
    more = lab([Softmax()], (0, 1), out=out)
    assert (first.record["resumed"], more.record["resumed"]) == (0, 1)
    assert more.summary["runs"][0] == first.summary["runs"][0]
    assert done.stat().st_mtime_ns == stamp
    assert len(json.loads((out / "summary.json").read_text())["runs"]) == 2
    # Operations, depths and optimisers may be added; other settings are another run.
    grown = lab([Softmax(), Relu(power=0.0)], (0, 1), layers=[1, 2], optimizers=["adamw", "sgd"], out=out)
    assert (grown.record["resumed"], len(grown.summary["runs"])) == (2, 16)
    with pytest.raises(
        InputError, match="holds a result with `operation` relu:power=0 and `optimizer` sgd and `layers` 1 and `seeds` 1, which"
    ):
        lab([Softmax()], (0,), layers=[2], out=out)
    assert len(json.loads((out / "summary.json").read_text())["runs"]) == 16

    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab([Softmax(), Relu(power=0.0)], (0, 1, 2), layers=[1, 2], optimizers=["adamw", "sgd"], out=out, progress=interrupt)
    with pytest.raises(InputError, match="holds a result with `operation` relu:power=0 and"):
        lab([Softmax()], (0,), layers=[2], out=out)
    with pytest.raises(ConfigurationError, match=r"has other settings: steps was \d+, is 7; samples was \d+, is 3\. Resume it"):
        lab([Softmax()], (0,), out=out, fields={"steps": 7}, samples=3)
    assert lab([Softmax()], (0,), out=out, overwrite=True).record["resumed"] == 0
    assert len(list((out / "store").glob("softmax-*.json"))) == 1
    # The same numbers but for the time that they took.
    (again,) = lab([Softmax()], (0,)).summary["runs"]
    assert {**again, "cpu_seconds": 0} == {**first.summary["runs"][0], "cpu_seconds": 0}


def test_divergence_is_written_down(lab, tmp_path):
    result = lab([Softmax()], out=tmp_path / "out", fields={"learning_rate": 1e12, "optimizer": "sgd", "steps": 40})
    (run,) = result.summary["runs"]
    assert run["outcome"] == "diverged"
    assert run["steps"] < 40
    assert run["trigger_excess"] is None or math.isfinite(run["trigger_excess"])
    assert read_table(tmp_path / "out" / "table.parquet")["value"].isna().any()


def test_refusals(lab, tmp_path):
    with pytest.raises(ConfigurationError, match="0 operations, 1 seed and 8 samples"):
        lab([])
    with pytest.raises(ConfigurationError, match="1 sample; expected"):
        lab([Softmax()], samples=1)
    with pytest.raises(ConfigurationError, match="`operation` has softmax twice"):
        lab([Softmax(), Softmax()])
    with pytest.raises(ConfigurationError, match="`layers` has 2 twice"):
        lab([Softmax()], layers=[2, 1, 2])
    (tmp_path / "mine.txt").write_text("something else")
    with pytest.raises(InputError, match=r"holds no run\.json, so it is no earlier result and is not replaced"):
        lab([Softmax()], out=tmp_path, overwrite=True)
    with pytest.raises(InputError, match=r"holds no store/settings\.json, so there is no run to go on with"):
        lab([Softmax()], out=tmp_path)
    with pytest.raises(InputError, match="exists and is a file"):
        lab([Softmax()], out=tmp_path / "mine.txt", overwrite=True)
    assert (tmp_path / "mine.txt").is_file()
    with pytest.raises(InputError, match="the text has 27 different characters, and the task needs 28; take a text with more"):
        lab([Softmax()], fields={"characters": 28})


# --- the command ---


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, ["backcopy", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, result.output
    return result


def test_the_command_prints_a_table(text, tmp_path):
    out = tmp_path / "out"
    options = ["--operation", "softmax", "--layers", "1,3", "--no-feed-forward", "0", "--seeds", "0", "--steps", 2]
    options += ["--corpus", text, "--out", out]
    lines = run(*options).stdout.splitlines()
    assert "excess at triggers" in " ".join(lines[:2])
    assert [line.split()[:4] for line in lines[2:4]] == [["softmax", "adamw", "1", "0"], ["softmax", "adamw", "3", "0"]]
    assert "scale small; losses in nats a token; ratios are BOS to the mean of the others" in lines
    assert lines[-2:] == [f"table  {out / 'table.parquet'}", f"figure {out / 'curves.png'}"]
    again = run(*options, "--json")
    runs = json.loads(again.stdout)["runs"]
    assert [entry["no_feed_forward"] for entry in runs] == [[0], [0]]
    assert runs == json.loads((out / "summary.json").read_text())["runs"]
    assert "2 of 2 runs were there already; --overwrite trains them again" in run(*options).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operation", "sofmax"], "Did you mean 'softmax'?"),
        (["--operation", ","], "0 operations"),
        (["--optimizer", "adam"], "optimizer 'adam' must be adamw or sgd"),
        (["--layers", "0"], "layers 0 must be at least 1"),
        (["--layers", "one"], "--layers 'one' must be whole numbers"),
        (["--steps", "0"], "steps 0 must be at least 1"),
        (["--no-attention", "0"], "no layer would be left with attention"),
        (["--no-attention", "1"], "no layer 1 to take the attention out of"),
        (["--learning-rate", "nan"], "--learning-rate is nan; expected a finite number"),
        (["--triggers", "27"], "27 triggers among 27 characters"),
        (["--heads", "5"], "hidden_size 64 is not a multiple of num_attention_heads 5"),
        (["--corpus", "nowhere.txt"], "there is no text file 'nowhere.txt'"),
    ],
)
def test_the_command_refuses_in_one_line(text, arguments, message):
    result = run("--seeds", "0", "--corpus", text, "--operation", "softmax", *arguments, status=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
