"""One run over two processes, with replicas and with shards: the numbers of one process, written once, resumed exactly."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file
from tests.training.conftest import short
from tests.training.two_processes import forget_the_second_half
from transformers import AutoModelForCausalLM, Trainer

from sinklab.errors import ConfigurationError
from sinklab.results.table import read_run, read_table
from sinklab.training.process import training_arguments
from sinklab.training.train import earlier_run
from sinklab.training.trainer import PretrainingTrainer

KEYS = ["probe", "metric", "layer", "head", "query_position", "key_position", "step"]

TOLERANCE = 1e-5
"""Between sums in another order. A rounding of a loss or norm of up to 8 is at most 2^-22; there are some tens of them on the
way to a loss and, through the gradients of the steps before, to the weights that it is taken with. A row that is not where it
belongs or a mean that is not taken moves a loss by 1e-2."""

PARALLEL = ("ddp", "fsdp")


def in_two_processes(what: str, folder: Path, text: Path, cache: Path) -> None:
    """Run a function of two_processes.py under torchrun; what it said is in ``folder/stdout`` and ``folder/stderr``."""
    config = folder / "config.json"
    config.write_text(json.dumps(short(text).model_dump(mode="json")))
    script = Path(__file__).with_name("two_processes.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), what, str(folder), str(config), str(cache)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)


@pytest.fixture(scope="module")
def two(tmp_path_factory, text, cache) -> Path:
    """Folder of all runs; one start for all tests, as starting costs more than running."""
    folder = tmp_path_factory.mktemp("two")
    in_two_processes("replicas_and_shards", folder, text, cache)
    return folder


def numbers(folder: Path) -> pd.DataFrame:
    table = read_table(folder / "table.parquet")
    return table[table["metric"] != "tokens_per_second"].sort_values(KEYS).reset_index(drop=True)


def losses(folder: Path) -> pd.DataFrame:
    table = numbers(folder)
    return table[table["metric"].isin(["train_loss", "held_out_loss", "loss"])].reset_index(drop=True)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_numbers_are_those_of_one_process(two, finished, parallel):
    one, both = numbers(finished.folder), numbers(two / parallel)
    pd.testing.assert_frame_equal(one[KEYS], both[KEYS])
    assert {"train_loss", "held_out_loss", "gu2024", "sink_loss_gap", "entropy", "massive_value"} <= set(both["metric"])
    # Positions and counts are whole numbers, and the largest of these metrics is a ratio of norms below 32.
    assert (one["value"] - both["value"]).abs().max() < 4 * TOLERANCE
    assert (losses(finished.folder)["value"] - losses(two / parallel)["value"]).abs().max() < TOLERANCE


def test_shards_are_shards(two):
    kinds = {parallel: json.loads((two / f"{parallel}.json").read_text())["weights"] for parallel in PARALLEL}
    assert kinds["ddp"] == ["Parameter"]
    assert "DTensor" in kinds["fsdp"]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_resumed_run_ends_with_the_same_bits(two, parallel):
    resumed = read_run(two / f"{parallel}-resumed")
    assert resumed["resumed"] == [{"from": "checkpoint-4"}]
    pd.testing.assert_frame_equal(numbers(two / parallel), numbers(two / f"{parallel}-resumed"))
    before, after = (load_file(two / name / "model" / "model.safetensors") for name in (parallel, f"{parallel}-resumed"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_model_is_whole_and_loads(two, finished, parallel):
    one, both = (load_file(folder / "model" / "model.safetensors") for folder in (finished.folder, two / parallel))
    assert one.keys() == both.keys()
    # Adam moves a weight by the learning rate whatever the gradient, so a small gradient carries its rounding into the weight.
    assert max((one[name] - both[name]).abs().max().item() for name in one) < 10 * TOLERANCE
    AutoModelForCausalLM.from_pretrained(two / parallel / "model")


def test_one_process_writes_and_speaks(two):
    run = read_run(two / "ddp")
    assert (run["status"], run["resolved"]["processes"], run["resolved"]["micro_batch_size"]) == ("finished", 2, 2)
    said = (two / "stdout").read_text()
    assert said.count('"status": "finished"') == 4  # four runs
    assert (two / "stderr").read_text().count("step 8/8  loss") == 4


@pytest.mark.parametrize(
    ("begun", "processes", "now"), [("fsdp", 1, "fsdp"), ("fsdp", 2, "ddp"), ("ddp", 2, "fsdp")], ids=["one", "ddp", "fsdp"]
)
def test_shards_are_resumed_as_shards_only(two, text, monkeypatch, begun, processes, now):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(
        ConfigurationError, match=f"are of training.parallel {begun} with 2 processes, and cannot .* {now} with"
    ):
        earlier_run(two / begun, short(text, f"training.parallel={now}"), None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert earlier_run(two / begun, short(text, f"training.parallel={begun}"), None) == read_run(two / begun)


def test_replicas_may_be_fewer_when_resumed(two, finished, run, tmp_path):
    forget_the_second_half(Path(shutil.copytree(two / "ddp", tmp_path / "run")))
    resumed = run(resume=True)
    assert resumed.record["resumed"] == [{"from": "checkpoint-4"}]
    assert resumed.record["resolved"]["processes"] == 1
    difference = numbers(finished.folder)["value"] - numbers(resumed.folder)["value"]
    assert difference.abs().max() < 4 * TOLERANCE


VARIANTS = {
    "accumulated": ["training.micro_batch_size=1"],
    "recomputed": ["training.gradient_checkpointing=true"],
    "compiled": ["training.compile=true"],
    "sink_logit": ["model.operation.name=sink_logit"],
    "sigma_reparam": ["model.operation.name=sigma_reparam"],
    "untied": ["model.tie_word_embeddings=false"],
    **{name: [f"optimizer.name={name}", "optimizer.learning_rate=1e-3"] for name in ("adam", "sgd")},
    "bfloat16": ["training.dtype=bfloat16"],
}


@pytest.mark.slow
def test_shards_follow_one_process_in_every_setting(tmp_path, text, cache, run):
    (tmp_path / "variants.json").write_text(json.dumps(VARIANTS))
    in_two_processes("variants", tmp_path, text, cache)
    for name, changes in VARIANTS.items():
        one, both = (result["value"] for result in map(losses, (run(*changes, folder="one").folder, tmp_path / name)))
        # Both round to bfloat16 on the way, 2^-9 each time, and a loss near 6 averages over such roundings.
        rounding = 2**-9 if name == "bfloat16" else TOLERANCE
        assert (one - both).abs().max() < rounding, name
        shutil.rmtree(tmp_path / "one")


def test_a_batch_that_cannot_be_divided_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigurationError, match="batch_size 3 cannot be divided into 2 processes of whole micro-batches of one"
    ):
        training_arguments(short(text, "training.batch_size=3"), tmp_path)


def test_accelerate_told_otherwise_is_refused(text, tmp_path, monkeypatch):
    def as_launched(trainer: Trainer) -> None:
        trainer.is_fsdp_enabled = True

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", as_launched)
    trainer = object.__new__(PretrainingTrainer)
    trainer.config, trainer.args = short(text), training_arguments(short(text), tmp_path)
    with pytest.raises(ConfigurationError, match="parallel is ddp, and accelerate was asked to shard the weights"):
        trainer.create_accelerator_and_postprocess()
