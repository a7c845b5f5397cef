"""SinkCallback: it sees what the audit sees, changes nothing, works on any Trainer, and its windows are the right ones."""

import copy

import pandas as pd
import pytest
import torch
from tests.conftest import TINY, make_sinklm
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.language_model import SinkLM
from sinklab.probes.entropy import Entropy
from sinklab.probes.sink_rate import SinkRate
from sinklab.results.metric import catalogue, declared
from sinklab.results.table import make_table, read_table
from sinklab.training import callback as callback_file
from sinklab.training import record
from sinklab.training.callback import FIRST_POSITIONS, HEADLINE, SinkCallback, _strongest, measure_sinks, measuring
from sinklab.training.rows import _Limit, limited_attention, token_losses, windowed_losses

ROWS = torch.randint(2, 300, (6, 24), generator=torch.Generator().manual_seed(1))

SMALL = {**TINY, "vocab_size": 300}


def make_llama(implementation: str = "sdpa", **fields) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, **fields)
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


class Examples(torch.utils.data.Dataset):
    """Eight fixed rows."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(2, 300, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def make_trainer(model, folder, callbacks=(), **arguments) -> Trainer:
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=arguments.pop("max_steps", 4),
            learning_rate=1e-2,
            use_cpu=True,
            logging_steps=arguments.pop("logging_steps", 1),
            save_strategy="no",
            report_to=arguments.pop("report_to", "none"),
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Examples(),
        data_collator=torch.utils.data.default_collate,
        callbacks=list(callbacks),
    )


# --- it changes nothing ---


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_training_is_bit_identical_with_and_without(tmp_path, bf16):
    def trained(callbacks):
        model = make_llama(attention_dropout=0.1)  # draws random numbers at every step
        trainer = make_trainer(model, tmp_path, callbacks, bf16=bf16)
        trainer.train()
        return model, [record["loss"] for record in trainer.state.log_history if "loss" in record]

    plain, plain_losses = trained([])
    callback = SinkCallback(ROWS, every=1, window=8)
    watched, watched_losses = trained([callback])
    assert len(plain_losses) == 4
    assert watched_losses == plain_losses
    assert all(torch.equal(left, right) for left, right in zip(plain.parameters(), watched.parameters(), strict=True))
    assert sorted(set(callback.table.table()["step"])) == [0, 1, 2, 3, 4]


def test_rows_of_several_tables_are_the_rows_that_were_given(monkeypatch):
    rows = [
        {"metric": "loss", "unit": "nats", "value": number / 7 if number % 3 else float("nan"), "key_position": number}
        if number % 2
        else {"metric": "gu2024", "unit": "percent", "value": float(number), "module": "layers.0", "version": 2}
        for number in range(20)
    ]
    plain, packed = record.RunTable(None, {"seed": 3}), record.RunTable(None, {"seed": 3})
    plain.add(rows, step=5)
    monkeypatch.setattr(record, "LOOSE_ROWS", 6)
    for start in range(0, 20, 4):
        packed.add(rows[start : start + 4], step=5)
    assert (len(packed._tables), len(packed._loose)) == (2, 4)
    pd.testing.assert_frame_equal(packed.table(), plain.table())
    pd.testing.assert_frame_equal(packed.table(), make_table([{**row, "seed": 3, "step": 5} for row in rows]))


def test_modes_forwards_and_random_states_are_restored():
    model = make_sinklm().train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()

    def fails() -> None:
        with measuring(model) as (plain, _):
            assert not any(module.training for module in plain.modules())
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(model)


def test_wrappers_and_autocast_are_taken_off(tmp_path):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    class Wrapped(nn.Module):  # as DistributedDataParallel holds its module
        def __init__(self, module):
            super().__init__()
            self.module = module

    bare = make_sinklm()
    expected = token_losses(bare, ROWS)
    AcceleratorState._reset_state(reset_partial_state=True)
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(copy.deepcopy(bare))
    assert not torch.equal(token_losses(prepared, ROWS), expected)
    patched = vars(prepared)["forward"]
    with measuring(torch.compile(Wrapped(prepared))) as (plain, clock):
        assert plain is prepared
        assert torch.equal(token_losses(plain, ROWS), expected)
    assert vars(prepared)["forward"] is patched
    assert clock.seconds > 0
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("operation", ["softmax", "sigmoid", "sink_logit", "sink_token"])
def test_rates_are_those_of_the_audit(operation):
    model = make_sinklm({"name": operation})
    with torch.no_grad():  # random weights have no sink; a large key does
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(30)
            layer.self_attn.k_proj.weight.mul_(30)
    seen = measure_sinks(model, ROWS, threshold=0.2, window=8)

    found = {
        (row["metric"], row.get("layer"), row.get("head"), row.get("key_position")): row["value"]
        for row in seen.rows
        if row["probe"] == "sink_rate"
    }
    with torch.no_grad(), attend(model, [SinkRate(threshold=0.2)]) as session:
        model(input_ids=ROWS)
    table = session.table()
    table = table[table["metric"] == "gu2024"]
    whole = table[table["layer"].isna()]
    assert whole["value"].max() > 0
    for row in whole.itertuples():
        assert found["gu2024", None, None, row.key_position] == row.value
    heads = table[table["layer"].notna() & (table["key_position"] < FIRST_POSITIONS)]
    for row in heads.itertuples():
        assert found["gu2024", row.layer, row.head, row.key_position] == row.value
    assert seen.headline["sink_rate"] == found["gu2024", None, None, 0]
    assert seen.operation == operation


def planted() -> SinkLM:
    """Heads of the first layer attend to tokens 40 to 51, wherever they stand."""
    model = make_sinklm()
    attention = model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.zero_()
        attention.q_proj.weight[7::8, 0] = 0.7  # rotary angles of slow frequencies keep the sign
        attention.k_proj.weight[7::8, 1] = 0.7
        model.embed_tokens.weight[:, :2] = torch.tensor([1.0, 0.0])
        model.embed_tokens.weight[40:52, 1] = 1.0
    return model


def test_entropy_is_taken_at_the_sink_that_was_found_and_says_which(monkeypatch):
    model, rows = planted(), torch.randint(60, 290, (12, 24), generator=torch.Generator().manual_seed(0))
    rows[:, 2] = torch.arange(40, 52)
    passes = []
    monkeypatch.setattr(callback_file, "attend", lambda *args, **kwargs: passes.append(args) or attend(*args, **kwargs))
    with torch.no_grad():
        seen = measure_sinks(model, rows, window=8)
        assert len(passes) == 2  # it was not where it was expected
        again = measure_sinks(model, rows, window=8, expected=seen.sinks)
        assert len(passes) == 3
        with attend(model, [Entropy().about(seen.sinks)]) as session:
            model(input_ids=rows)
    assert seen.sinks.main.position == 2
    assert seen.headline["sink_position"] == 2
    # One name, one meaning: the curve is a position, and the rates in the table are called rates.
    rates = [row for row in seen.rows if row["metric"] == "sink_position_rate"]
    assert rates[0]["key_position"] == 2
    assert rates[0]["value"] == seen.headline["sink_rate_max"]
    assert "sink_position" not in catalogue()
    assert seen.headline["sink_rate_max"] == seen.sinks.main.rate == 50.0  # one of two layers
    of_sink = [row for row in seen.rows if row["metric"] == "entropy_without_sink"]
    assert {row["sink"] for row in of_sink} == {"position 2"}
    table = session.table()
    expected = table.loc[table["metric"] == "entropy_without_sink", "value"].tolist()
    assert [row["value"] for row in of_sink] == pytest.approx(expected, abs=1e-6)
    assert [row["value"] for row in again.rows if row["metric"] == "entropy_without_sink"] == pytest.approx(expected, abs=1e-6)


def test_the_loss_is_that_of_the_model_and_the_gap_is_the_difference():
    model = make_sinklm()
    seen = {row["metric"]: row for row in measure_sinks(model, ROWS, window=8).rows if row["probe"] == "sink_readout"}
    assert seen["loss"]["value"] == pytest.approx(model(input_ids=ROWS, labels=ROWS).loss.item(), abs=1e-6)
    assert seen["loss"]["count"] == 6 * 23
    assert seen["sink_loss_gap"]["count"] == 6 * (23 - 8)
    difference = seen["windowed_loss_without_sink"]["value"] - seen["windowed_loss_with_sink"]["value"]
    assert seen["sink_loss_gap"]["value"] == pytest.approx(difference, abs=1e-6)


@pytest.mark.parametrize(
    ("profile", "limit", "expected"),
    [
        ({0: 0.0, 1: 0.0, 2: 0.0}, 2, [0]),
        ({0: 20.0, 1: 5.0, 2: 50.0}, 2, [0]),
        ({0: 20.0, 1: 10.0, 2: 50.0}, 3, [2]),
        ({0: 20.0, 1: 10.0, 2: 0.0}, 3, [0, 1]),
        ({0: 0.0, 1: 10.0}, 0, [0]),
    ],
    ids=["none", "late ones do not count", "strongest", "two", "limit is at least one"],
)
def test_which_positions_are_sinks(profile, limit, expected):
    assert _strongest(profile, limit) == expected


# --- windows ---


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_window_is_a_mask(implementation):
    model = make_llama(implementation)
    positions = torch.arange(24)
    for kept in ([], [0], [2, 5]):
        visible = (positions[:, None] >= positions) & (
            (positions[:, None] - positions < 7) | torch.isin(positions, torch.tensor(kept))
        )
        mask = torch.zeros(24, 24).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        expected = model(input_ids=ROWS, attention_mask=mask).logits
        with torch.no_grad(), limited_attention(model, 7, kept):
            got = model(input_ids=ROWS).logits
        # Two masks of the same meaning; the kernels add hidden scores of -inf or -3e38 alike.
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert torch.equal(model(input_ids=ROWS).logits, make_llama(implementation)(input_ids=ROWS).logits)


def test_windowed_losses_are_of_the_tokens_beyond_the_window():
    model = make_sinklm()
    with torch.no_grad():
        kept, hidden = windowed_losses(model, ROWS, 8, [0])
        assert kept.shape == hidden.shape == (6, 23 - 8)
        with limited_attention(model, 8):
            assert torch.equal(hidden, token_losses(model, ROWS)[:, 8:])


def test_what_takes_no_window_says_so():
    model = make_sinklm()
    with torch.no_grad(), limited_attention(model, 4):
        first = model(input_ids=ROWS[:, :8], use_cache=True)
        with pytest.raises(UnsupportedModelError, match="1 queries and 9 keys; a window is laid over self-attention without"):
            model(input_ids=ROWS[:, 8:9], past_key_values=first.past_key_values)

    def flash_attention_forward(*args, **kwargs):
        raise AssertionError("not called")

    states = torch.zeros(1, 2, 4, 16)
    with pytest.raises(UnsupportedModelError, match=r"runs flash_attention_forward, which takes no 4-D mask; load the model"):
        _Limit(model, 2, []).on_attention(flash_attention_forward, model.layers[0].self_attn, states, states, states, None)


# --- its rows ---


def test_rows_go_to_the_file_and_a_resumed_training_keeps_them(tmp_path):
    path = tmp_path / "table.parquet"
    trainer = make_trainer(
        make_llama(), tmp_path, [SinkCallback(ROWS, every=2, window=8, table=path, columns={"corpus": "fixed"})]
    )
    trainer.train()
    table = read_table(path)
    assert sorted(set(table["step"])) == [0, 2, 4]
    assert set(table["corpus"]) == {"fixed"}
    assert set(table["model"]) == {"LlamaForCausalLM"}
    assert set(table["operation"]) == {"softmax"}
    assert set(table["probe"]) == {"entropy", "hidden_norm", "massive_activation", "max_logit", "sink_rate", "sink_readout"}
    positions = table.loc[table["layer"].notna() & table["key_position"].notna(), "key_position"]
    assert positions.max() < FIRST_POSITIONS
    assert set(table.loc[(table["metric"] == "gu2024") & table["layer"].isna(), "key_position"]) == set(range(24))

    later = SinkCallback(ROWS, every=2, window=8, table=path)
    resumed = make_trainer(make_llama(), tmp_path, [later], max_steps=6)
    state = resumed.state
    state.global_step, state.max_steps = 2, 6
    later.on_train_begin(resumed.args, state, resumed.control, model=resumed.model)
    assert sorted(set(later.table.table()["step"])) == [0, 2]


def test_a_training_that_ended_early_and_goes_on_leaves_the_rows_of_one_that_did_not(tmp_path):
    def table(folder: str, *, ends_at: int | None = None, max_steps: int = 4):
        class Ends(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_save |= state.global_step == ends_at
                control.should_training_stop |= state.global_step == ends_at

        path = tmp_path / folder / "table.parquet"
        trainer = make_trainer(
            make_llama(), tmp_path / folder, [Ends(), SinkCallback(ROWS, every=2, window=8, table=path)], max_steps=max_steps
        )
        saved = tmp_path / folder / "checkpoint-3"
        trainer.train(resume_from_checkpoint=str(saved) if saved.is_dir() else None)
        return read_table(path)

    whole = table("whole")
    assert sorted(set(table("ended", ends_at=3)["step"])) == [0, 2, 3]  # where it ends, it is measured
    pd.testing.assert_frame_equal(table("ended"), whole)


class Killed(Exception):
    """What stands for the end of a process."""


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_rows_are_on_disk_when_a_checkpoint_is(tmp_path, monkeypatch, strategy):
    """Of saves that are asked for after the last step of an epoch, and after an evaluation, too."""

    class Kills(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise Killed

    monkeypatch.setattr(record, "WRITING_SHARE", 0.0)  # no row is written because there is time for it
    path = tmp_path / "table.parquet"
    callback = SinkCallback(ROWS, every=1, window=8, table=path)
    trainer = make_trainer(make_llama(), tmp_path, [callback, Kills()], max_steps=100, metric_for_best_model="loss")
    trainer.args.save_strategy, trainer.eval_dataset = SaveStrategy(strategy), Examples()
    if strategy == "best":
        trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy("steps"), 3
    with pytest.raises(Killed):
        trainer.train()
    assert set(read_table(path)["step"]) == set(range(trainer.state.global_step + 1))


def test_what_a_trainer_has_gathered_for_its_own_log_stays_there(tmp_path):
    """The trainers of TRL add to every log the means of what they have gathered, and begin anew."""

    class Gathers(Trainer):
        gathered = 0

        def training_step(self, *args, **kwargs):
            self.gathered += 1
            return super().training_step(*args, **kwargs)

        def log(self, logs, start_time=None):
            super().log({**logs, "gathered": self.gathered}, start_time)
            self.gathered = 0

    trainer = make_trainer(make_llama(), tmp_path, logging_steps=2)
    trainer.__class__ = Gathers
    trainer.add_callback(SinkCallback(ROWS, every=1, window=8, trainer=trainer))
    trainer.train()
    history = trainer.state.log_history
    assert [record["step"] for record in history if "sink_loss_gap" in record] == [0, 1, 2, 3, 4]
    assert [record["gathered"] for record in history if "loss" in record] == [2, 2]


def test_each_name_is_a_number_of_the_table():
    measured = measure_sinks(make_llama(), ROWS, window=8)
    rows = [row for row in measured.rows if "layer" not in row]
    assert list(measured.headline) == list(HEADLINE)
    for name, (metric, _, column) in HEADLINE.items():
        assert declared(metric), name
        assert measured.headline[name] in [row.get(column) for row in rows if row["metric"] == metric], name
    # Two of what the integrations send elsewhere must not be ours.
    assert not {"train_loss", "total_flos"} & HEADLINE.keys()


def test_a_model_that_computes_no_numbers_is_written_down_as_such(tmp_path):
    model = make_llama()
    callback = SinkCallback(ROWS, every=2, window=8)
    trainer = make_trainer(model, tmp_path, [callback], max_steps=2)
    trainer.train()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
        model.model.layers[0].self_attn.q_proj.weight.fill_(float("nan"))
    trainer.state.global_step = 4
    callback.on_step_end(trainer.args, trainer.state, trainer.control, model=model)
    (row,) = callback.table.table()[callback.table.table()["step"] == 4].itertuples()
    assert row.metric == "loss"
    assert callback.last.headline == {}


@pytest.mark.parametrize(
    "model",
    [
        BertForMaskedLM(BertConfig(**SMALL)),
        BertModel(BertConfig(**SMALL)),
        BertForSequenceClassification(BertConfig(**SMALL)),
        T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
    ],
    ids=["masked", "no head", "classes", "two sides"],
)
def test_a_model_that_predicts_no_next_token_is_refused(model):
    """Its next-token loss would be written down as that of any other: of a masked model, of tokens that it sees."""
    with pytest.raises(UnsupportedModelError, match=f"next-token losses, and {type(model).__name__} has none"):
        measure_sinks(model.eval(), ROWS, window=8)
    callback = SinkCallback(ROWS, window=8)
    with pytest.raises(UnsupportedModelError):
        callback.on_train_begin(None, TrainerState(), TrainerControl(), model=model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rows": ROWS.float()}, r"rows must be int64 \(rows, seq_len\), got torch.float32 \(6, 24\)"),
        ({"every": 0}, "every 0 must be 1 or more: steps between measurements"),
        ({"window": 23}, "window 23 leaves no token beyond it in probe rows of 24 tokens; lower the window"),
        ({"threshold": 1.0}, r"threshold 1.0 must be in \[0, 1\)"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        SinkCallback(**{"rows": ROWS, "window": 8, **arguments})
