"""Runs: what they write, that they resume to the same numbers, and what they refuse."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from tests.training.conftest import short
from transformers import AutoModelForCausalLM, AutoTokenizer

from sinklab.errors import ConfigurationError, InputError
from sinklab.models.loading import load_model
from sinklab.recipes.emergence import emergence
from sinklab.results.blocks import counted
from sinklab.results.table import read_table
from sinklab.training import bookkeeping, process
from sinklab.training.bookkeeping import Bookkeeper
from sinklab.training.checkpoints import newest
from sinklab.training.process import chosen_dtype, has_bfloat16, training_arguments
from sinklab.training.record import display, read_result
from sinklab.training.train import run_training
from sinklab.training.trainer import PretrainingTrainer

ROOT = Path(__file__).parents[2]


def values(table: pd.DataFrame, metric: str) -> dict[int, float]:
    """Step to value of a metric of the whole model."""
    rows = table[(table["metric"] == metric) & table["layer"].isna() & table["key_position"].isna()]
    return dict(zip(rows["step"].astype(int), rows["value"].astype(float), strict=True))


def test_a_run_leaves_a_table_a_record_checkpoints_and_a_model(finished):
    folder = finished.folder
    assert finished.summary["status"] == "finished"
    assert finished.summary["steps"] == 8
    table = read_table(folder / "table.parquet")
    pd.testing.assert_frame_equal(table, finished.table.reset_index(drop=True))
    assert list(values(table, "train_loss")) == [2, 4, 6, 8]
    assert list(values(table, "held_out_loss")) == [4, 8]
    assert list(values(table, "sink_loss_gap")) == [0, 4, 8]
    assert values(table, "held_out_loss")[8] == finished.summary["held_out_loss"]
    assert set(table["run_id"]) == {finished.record["run_id"]}
    run = json.loads((folder / "run.json").read_text())
    assert run == json.loads(json.dumps(finished.record))
    assert (run["status"], run["kind"], run["steps"]) == ("finished", "pretrain", 8)
    assert run["config"]["training"]["steps"] == 8
    known = {(row["probe"], row["metric"], row["unit"]) for row in run["definitions"]}
    assert set(zip(table["probe"], table["metric"], table["unit"], strict=True)) <= known
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-8"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.num_parameters() == run["resolved"]["parameters"]
    assert AutoTokenizer.from_pretrained(folder / "model").vocab_size == model.config.vocab_size
    again = read_result(folder)
    assert again.record == run
    assert again.summary["tokens_per_second"] == finished.summary["tokens_per_second"]


KILLED = """
import os, signal, sys
from pathlib import Path
from sinklab.training.bookkeeping import Bookkeeper
from sinklab.training.train import run_training
from tests.training.conftest import short

native = Bookkeeper.on_log

def on_log(self, args, state, control, logs, **kwargs):
    native(self, args, state, control, logs, **kwargs)
    if state.global_step == 6:
        os.kill(os.getpid(), signal.SIGKILL)

Bookkeeper.on_log = on_log
run_training(short(Path(sys.argv[3])), Path(sys.argv[1]), cache=Path(sys.argv[2]), progress=False)
"""


def without_times(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that a run must give again bit by bit."""
    return table[table["metric"] != "tokens_per_second"].drop(columns="run_id").reset_index(drop=True)


def test_a_killed_run_resumes_to_the_same_numbers(finished, tmp_path, text, cache):
    killed = tmp_path / "killed"
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(killed), str(cache), str(text)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    assert read_table(killed / "table.parquet")["step"].max() in (4, 6)  # the last one if writing was cheap enough
    assert json.loads((killed / "run.json").read_text())["status"] == "running"

    resumed = run_training(short(text), killed, resume=True, cache=cache, progress=False)
    assert resumed.summary["status"] == "finished"
    assert resumed.record["resumed"] == [{"from": "checkpoint-4"}]
    pd.testing.assert_frame_equal(without_times(resumed.table), without_times(finished.table))
    for name in ("model.safetensors", "tokenizer.json"):
        assert (killed / "model" / name).read_bytes() == (finished.folder / "model" / name).read_bytes()


def interrupted(finished, folder: Path) -> Path:
    """A copy of the finished run as a kill after the last checkpoint would have left it."""
    shutil.copytree(finished.folder, folder)
    shutil.rmtree(folder / "model")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "status": "running"}))
    return folder


def test_another_configuration_is_refused_with_the_fields_that_differ(finished, run, tmp_path):
    interrupted(finished, tmp_path / "run")
    expected = (
        r"run is a run of another configuration: model.hidden_size was 32 and is 48; optimizer.learning_rate was 0.005 and is "
        r"0.001\. Resume it as it was, choose another `out`, or start from its weights with `init_from`"
    )
    with pytest.raises(ConfigurationError, match=expected):
        run("model.hidden_size=48", "optimizer.learning_rate=1e-3", resume=True)
    assert run("training.keep=1", "training.micro_batch_size=2", resume=True).summary["status"] == "finished"


def test_another_text_is_refused(finished, text, cache, tmp_path):
    folder = interrupted(finished, tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    record["data"]["sha256"] = "0" * 64
    (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"the text of .* has changed since the run was begun: .* tokens of .* then"):
        run_training(short(text), folder, resume=True, cache=cache, progress=False)


def test_an_output_directory_in_use_is_refused(finished, run, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    with pytest.raises(InputError, match="exists; choose another with `out`, or replace it with `overwrite`"):
        run()
    with pytest.raises(ConfigurationError, match=r"resume goes on with the run .* and overwrite removes it"):
        run(resume=True, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds no run\.json, so there is no run to resume"):
        run(folder="other", resume=True)
    (tmp_path / "other" / "run.json").write_text('{"kind": "audit"}')
    with pytest.raises(InputError, match="holds no run of pretrain but of 'audit'"):
        run(folder="other", resume=True)
    interrupted(finished, tmp_path / "begun")
    with pytest.raises(InputError, match="with a run that has not ended; go on with it by `resume`, choose another with"):
        run(folder="begun")


def test_a_full_disk_is_one_sentence_and_loses_nothing(run, tmp_path, finished, monkeypatch):
    native = PretrainingTrainer._save_checkpoint

    def on_a_small_disk(self, model, trial):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.state.global_step == 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            native(self, model, trial)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(PretrainingTrainer, "_save_checkpoint", on_a_small_disk)
    with pytest.raises(
        InputError,
        match=r"checkpoint of step 8 could not be written to .*checkpoints: .*\. Make room, or choose another folder$",
    ) as error:
        run()
    assert "\n" not in str(error.value)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-4"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    resumed = run(resume=True)
    assert "error" not in resumed.record
    pd.testing.assert_frame_equal(without_times(resumed.table), without_times(finished.table))


def test_a_batch_that_cannot_be_divided_is_refused(run, monkeypatch):
    with pytest.raises(ConfigurationError, match="batch_size 4 must be a multiple of micro_batch_size 3"):
        run("training.micro_batch_size=3")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigurationError, match="batch_size 4 cannot be divided into 3 processes"):
        run()


def test_divergence_is_found_recorded_and_ends_the_run(run):
    diverged = run("optimizer.learning_rate=100", "optimizer.max_grad_norm=0", "training.steps=40", "schedule.warmup_steps=0")
    assert diverged.summary["status"] == "diverged"
    assert diverged.summary["steps"] < 40
    divergence = diverged.record["divergence"]
    assert divergence["found_at"] == diverged.summary["steps"]
    assert "above 2 times its best" in divergence["reason"]
    assert values(diverged.table, "diverged_at") == {diverged.summary["steps"]: divergence["step"]}
    assert (diverged.folder / "model").is_dir()


def disturbed(monkeypatch, step: int, factor: float) -> None:
    """Have the loss of a step, counted from 0, be so many times what it is."""
    native = PretrainingTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        return native(self, *args, **kwargs) * (factor if self.state.global_step == step else 1)

    monkeypatch.setattr(PretrainingTrainer, "compute_loss", compute_loss)


def test_the_step_of_the_first_nan_is_known(run, monkeypatch):
    disturbed(monkeypatch, 4, float("nan"))
    diverged = run("training.log_every=4", "training.save_every=8", "training.micro_batch_size=2")
    assert diverged.summary["status"] == "diverged"
    # Step 5, counted from 1, is the first bad one; step 8 the next record; its weights are not kept.
    assert diverged.record["divergence"] == {"step": 5, "found_at": 8, "reason": "the training loss is nan from step 5 on"}
    assert not (diverged.folder / "checkpoints").exists() or not any((diverged.folder / "checkpoints").iterdir())
    assert not (diverged.folder / "model").exists()
    # What was measured before says nothing of the model that it ended with.
    assert (diverged.table["metric"] == "gu2024").any()
    assert diverged.summary["sink_rate"] is None
    (row,) = diverged.table[diverged.table["metric"] == "diverged_at"].itertuples()
    assert (row.value, row.step) == (5, 8)
    assert diverged.table[(diverged.table["metric"] == "train_loss") & (diverged.table["step"] == 8)]["value"].isna().all()


def test_a_loss_of_next_to_nothing_may_double(finished):
    book = Bookkeeper(short(Path("text")), table=None, held_out=None, tokens_per_step=1, screen=None, snapshot=None)
    book.trainer = SimpleNamespace(losses=[])
    assert book._judge(1, 0.01, 1.0, 1) is None
    assert book._judge(2, 0.9, 1.0, 1) is None
    assert book._judge(3, 1.02, 1.0, 1).reason == "the training loss is 1.02, above 2 times its best, 0.01"
    assert book._judge(4, 0.02, float("inf"), 1).reason == "the norm of the gradients is inf"
    assert book.divergence.step == 3


def stopping(monkeypatch, number: int, step: int) -> None:
    """Have a signal arrive at the beginning of a step, counted from 1."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Bookkeeper, "on_step_begin", on_step_begin)


def test_a_run_that_is_stopped_and_goes_on_leaves_what_an_uninterrupted_one_leaves(run, monkeypatch):
    # The record of step 3 is of four passes in each of three processes; the last signal arrives between two checkpoints.
    changes = ("training.log_every=3", "training.evaluate_every=4", "training.save_every=6", "training.micro_batch_size=1")
    whole = run(*changes, folder="whole")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number, step in ((signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGINT, 7)):
        with monkeypatch.context() as patch:
            stopping(patch, number, step)
            stopped = run(*changes, resume=True)
        assert (stopped.summary["status"], stopped.summary["steps"]) == ("stopped", step)
        assert stopped.record["stopped_by"] == number.name
        (facts,) = display(stopped)
        assert ("status", f"stopped after {counted(step, 'step')}, and can be resumed") in facts.rows
        assert newest(stopped.folder / "checkpoints").name == f"checkpoint-{step}"
        # No record, no evaluation and no measurement for the stop.
        so_far = whole.table[whole.table["step"] <= step]
        pd.testing.assert_frame_equal(without_times(stopped.table), without_times(so_far))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    resumed = run(*changes, resume=True)
    assert [entry["from"] for entry in resumed.record["resumed"]] == [f"checkpoint-{step}" for step in (1, 2, 7)]
    pd.testing.assert_frame_equal(without_times(resumed.table), without_times(whole.table))
    speeds = [result.table[result.table["metric"] == "tokens_per_second"] for result in (resumed, whole)]
    assert list(speeds[0]["count"]) == list(speeds[1]["count"]) == [3, 3, 2]
    volatile = {"folder", "tokens_per_second"}
    assert {name: resumed.summary[name] for name in resumed.summary if name not in volatile} == {
        name: whole.summary[name] for name in whole.summary if name not in volatile
    }
    assert resumed.record["weights_sha256"] == whole.record["weights_sha256"]
    assert resumed.record["stopped_by"] is None
    for result in (resumed, whole):
        assert sorted(path.name for path in (result.folder / "checkpoints").iterdir()) == ["checkpoint-6", "checkpoint-8"]


def test_a_divergence_before_the_stop_is_not_forgotten(run, monkeypatch):
    disturbed(monkeypatch, 2, 100)
    changes = ("training.stop_when_diverged=false", "training.log_every=1")
    whole = run(*changes, folder="whole")
    assert (whole.summary["status"], whole.record["divergence"]["found_at"]) == ("finished", 3)
    with monkeypatch.context() as patch:
        stopping(patch, signal.SIGTERM, 5)
        run(*changes)
    resumed = run(*changes, resume=True)
    assert resumed.record["resumed"][0]["from"] == "checkpoint-5"
    assert resumed.record["divergence"] == whole.record["divergence"]
    pd.testing.assert_frame_equal(without_times(resumed.table), without_times(whole.table))


def test_a_stop_with_losses_that_are_no_numbers_leaves_the_checkpoint_before(run, monkeypatch):
    disturbed(monkeypatch, 4, float("nan"))
    with monkeypatch.context() as patch:
        stopping(patch, signal.SIGINT, 5)
        stopped = run()
    assert (stopped.summary["status"], stopped.summary["steps"]) == ("stopped", 5)
    assert newest(stopped.folder / "checkpoints").name == "checkpoint-4"
    resumed = run(resume=True)
    assert resumed.record["divergence"] == {"step": 5, "found_at": 6, "reason": "the training loss is nan from step 5 on"}


def test_who_reads_with_the_model_reads_as_it_was_trained(finished, run):
    """Its tokenizer puts BOS in front of a text where the rows of the training have it, and else not."""
    without = run("data.bos=none", "training.snapshots=[3]").folder
    places = ("model", "snapshots/step-3", "checkpoints/checkpoint-8")
    assert [load_model(str(without / place)).encoder.adds_bos for place in places] == [False] * 3
    assert load_model(str(finished.folder / "model")).encoder.adds_bos


def test_weights_of_a_run_under_another_operation(finished, run):
    same = run(init_from=finished.folder, folder="same")
    assert same.record["init_from"]["new"] == same.record["init_from"]["dropped"] == []
    # The first loss is that of the trained weights, on the same tokenizer.
    assert values(same.table, "loss")[0] == values(finished.table, "loss")[8]
    other = run("model.operation.name=sink_token", init_from=finished.folder, folder="other")
    assert other.record["init_from"]["operation"] == "softmax"
    assert other.record["init_from"]["new"] == ["front_tokens.weight"]
    back = run(init_from=other.folder / "checkpoints" / "checkpoint-4", folder="back")
    assert back.record["init_from"]["dropped"] == ["front_tokens.weight"]


def test_maps_that_an_operation_scales_are_what_they_are_under_another(run):
    # sigma_reparam changes how a map is written down, and nothing about attention: as softmax the model is the same one.
    rate = ("optimizer.learning_rate=5e-2", "optimizer.weight_decay=0.5")  # σ(W) goes away from γ
    scaled = run("model.operation.name=sigma_reparam", *rate, folder="scaled")
    plain = run(init_from=scaled.folder, folder="plain")
    trained = values(scaled.table, "loss")[8]
    raw = load_model(str(scaled.folder / "model")).model.layers[0].self_attn.q_proj
    # (γ / σ) W is rounded once more as a weight than as a factor; a loss of 5 nats moves by its last digits.
    assert values(plain.table, "loss")[0] == pytest.approx(trained, abs=1e-5)
    assert not torch.allclose(raw.effective_weight(), raw.weight, rtol=0.01)  # else nothing was tried
    assert {key.rpartition(".")[2] for key in plain.record["init_from"]["dropped"]} == {"gamma", "left", "right"}


def test_parameters_of_an_operation_that_have_another_shape_begin_anew(run):
    gated = run("model.operation.name=gated", folder="gated")
    for changed in ("model.operation.name=gated_heads", "model.operation={name: gated, element_wise: false}"):
        start = run(changed, init_from=gated.folder, folder=changed).record["init_from"]
        state = [f"layers.{layer}.self_attn.operation_state.weight" for layer in range(2)]
        assert start["dropped"] == state
        assert set(state) <= set(start["new"])


def test_weights_that_do_not_fit_are_refused(finished, run, tmp_path):
    with pytest.raises(InputError, match="do not fit model: hidden_size is 32 there and 48 here"):
        run("model.hidden_size=48", init_from=finished.folder)
    with pytest.raises(InputError, match=r"embed_tokens\.weight has the shape .* there and .* here"):
        run("training.vocab_multiple=1000", init_from=finished.folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="there is no directory nowhere to take weights from"):
        run(init_from=Path("nowhere"))
    with pytest.raises(
        InputError, match=r"embedded_checkpoints/softmax do not fit model: hidden_size is 128 there and 32 here"
    ):
        run(init_from=Path("embedded:softmax"))
    with pytest.raises(InputError, match=r"holds no weights: expected config\.json and model\.safetensors there"):
        run(init_from=tmp_path / "empty")


def test_trackers(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run("training.report_to=[tensorboard]")
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    gaps = {event.step: event.value for event in events.Scalars("train/sink_loss_gap")}
    assert gaps == pytest.approx(values(result.table, "sink_loss_gap"), rel=1e-6)
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6, 8]
    with pytest.raises(ConfigurationError, match=r"report_to names wandb, .* not installed: pip install 'sinklab\[wandb\]'"):
        run("training.report_to=[wandb]", folder="wandb")


def test_what_a_run_sets_for_the_process_is_put_back(run):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    run("training.steps=4", "training.threads=1")
    assert torch.get_num_threads() == 2
    assert "ACCELERATE_DYNAMO_BACKEND" not in os.environ
    torch.set_num_threads(threads)


def test_lines_where_nobody_watches(capsys):
    with bookkeeping.display(10) as screen:
        screen.note("weights of [somewhere]")
        screen.progress("encoding", 10, 0)
        screen.step(3)
        screen.record(3, 2.34567, 12345.6)
        screen.result(3, {"sink_rate": 12.5, "sink_loss_gap": 0.123456})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "weights of [somewhere]",
        "step 3/10  loss 2.3457  12,346 tokens/s",
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
