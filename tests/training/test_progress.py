"""What a training shows while it goes, and the precision in which it computes."""

import json
import shutil

import pytest
import torch
from tests.training.conftest import short

from sinklab.recipes.emergence import emergence
from sinklab.training import process
from sinklab.training.process import chosen_dtype, has_bfloat16, training_arguments
from sinklab.training.progress import display
from sinklab.training.train import run_training


def show(screen) -> None:
    screen.note("weights of [somewhere]")
    screen.preparing("encoding", 10, 0)
    screen.step(3)
    screen.record(3, 2.34567, 12345.6, 61.2)
    screen.result(3, {"sink_rate": 12.5, "sink_loss_gap": 0.123456})


def test_lines_where_nobody_watches(capsys):
    with display(10) as screen:
        show(screen)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "weights of [somewhere]",
        "step 3/10  loss 2.3457  12,346 tokens/s  0:01:01 left",
        "step 3/10  sink rate 12.5 %  sink loss gap 0.123",
    ]


@pytest.fixture
def instructions(monkeypatch):
    """Say whether this device multiplies in bfloat16: ``instructions(False)``."""

    def say(there: bool) -> None:
        monkeypatch.setattr(process, "has_bfloat16", lambda device: there)
        monkeypatch.setattr("sinklab.training.train.has_bfloat16", lambda device: there)

    return say


@pytest.mark.parametrize(("there", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_recipes_take_bfloat16_where_the_device_has_it(there, dtype, instructions, tmp_path):
    instructions(there)
    assert chosen_dtype(emergence()) == dtype
    assert training_arguments(emergence(), tmp_path).bf16 == there


def test_a_device_that_only_imitates_bfloat16_does_not_have_it(monkeypatch):
    """Emulation is what makes a step slow, on a CPU and on a GPU before Ampere."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bfloat16("cpu")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not has_bfloat16("cuda")


def test_a_run_says_in_what_its_steps_are(run, instructions, text, cache, capsys):
    instructions(False)
    first = run("training.dtype=auto", "training.compile=false")
    assert first.record["resolved"]["dtype"] == "float32"
    assert first.record["config"]["training"]["dtype"] == "auto"
    record = {**first.record, "status": "running"}
    (first.folder / "run.json").write_text(json.dumps(record))
    shutil.rmtree(first.folder / "checkpoints" / "checkpoint-8")
    shutil.rmtree(first.folder / "model")
    instructions(True)
    capsys.readouterr()
    config = short(text, "training.dtype=auto", "training.compile=false")
    resumed = run_training(config, first.folder, resume=True, cache=cache)
    assert "its steps were in float32; here they are in bfloat16" in capsys.readouterr().err
    assert resumed.record["resolved"]["dtype"] == "bfloat16"
    assert resumed.record["resumed"] == [{"from": "checkpoint-4", "dtype_before": "float32"}]
