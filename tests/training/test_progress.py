"""What a training shows while it goes, and the precision in which it computes."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil

import pytest
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tests.training.conftest import short

from sinklab.recipes.emergence import emergence
from sinklab.training import process
from sinklab.training.process import chosen_dtype, has_bfloat16, training_arguments
from sinklab.training.progress import Bar, display
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


def test_nothing_when_not_wanted(capsys):
    with display(10, wanted=False) as screen:
        show(screen)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=160)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
    with Progress(*columns, console=console, auto_refresh=False) as bars:
        screen = Bar(10, bars)
        show(screen)
        bars.refresh()
    assert "weights of [somewhere]" in stream.getvalue()
    for part in (
        "training",
        "3/10",
        "loss 2.346",
        "12,346 tokens/s",
        "0:01:01 left",
        "sink rate 12.5 %",
        "sink loss gap 0.123",
    ):
        assert part in stream.getvalue(), part


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


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_asked_for_is_had(there, dtype, instructions, text):
    instructions(there)
    assert chosen_dtype(short(text, f"training.dtype={dtype}")) == dtype


def test_a_device_that_only_imitates_bfloat16_does_not_have_it(monkeypatch):
    """Emulation is what makes a step slow, on a CPU and on a GPU before Ampere."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bfloat16("cpu")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not has_bfloat16("cuda")


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or "ATEN_CPU_CAPABILITY" in os.environ,
    reason="AVX-512 is what it takes on x86, unless the environment sets what torch uses of it",
)
def test_a_cpu_has_it_by_what_its_kernels_need():
    assert has_bfloat16("cpu") == torch.backends.cpu.get_cpu_capability().startswith("AVX512")


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
    assert resumed.record["resumed"] == [{"from": "checkpoint-4", "passed_over": [], "dtype_before": "float32"}]


@pytest.mark.parametrize("there", [True, False])
def test_bfloat16_without_instructions_is_said_to_be_slow(there, text, cache, instructions, tmp_path, capsys):
    instructions(there)
    changes = ("training.dtype=bfloat16", "training.compile=false", "training.steps=1", "schedule.warmup_steps=0")
    run_training(short(text, *changes), tmp_path / "run", cache=cache)
    said = capsys.readouterr().err
    assert ("many times slower than in float32" in said) != there
