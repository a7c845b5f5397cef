"""Claims of papers with few of them: what they measure on models whose numbers can be worked out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pandas as pd
import pytest
import torch
from tests.claims.planted_models import by_position, drawn_rows, model_like, read_like
from transformers import BertConfig, BertForMaskedLM

from sinklab.corpora import resolve_corpus
from sinklab.errors import DoesNotApply
from sinklab.models.language_model import SinkLM
from sinklab.models.loading import load_model
from sinklab.registry import claims
from sinklab.training.rows import RandomPositions
from sinklab_claims import gu2024_pretraining as pretraining
from sinklab_claims import ranmilo2026
from sinklab_claims.barbero2025 import without_bos
from sinklab_claims.bondarenko2023 import masked
from sinklab_claims.chen2026 import half_way
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.gu2024_laws import measure, of_checkpoint
from sinklab_claims.gu2024_models import LENGTHS as ROW_LENGTHS
from sinklab_claims.gu2024_models import THRESHOLDS, folded, rates
from sinklab_claims.numbers.attention import carried
from sinklab_claims.son2024 import CALIBRATION, PREFIX, TEXTS, eight_bits
from sinklab_claims.verdict.rule import judge, judge_model
from sinklab_claims.yona2025 import COUNT, false_sinks
from sinklab_claims.zhai2023 import LENGTHS, NORMS, course, of_rows_of_scores


def test_entropy_bound_is_measured_on_every_norm_and_length():
    numbers = of_rows_of_scores(3, "tiny")["rows of scores"]
    assert len(LENGTHS) * len(NORMS) == 15
    assert numbers["largest_violation"] == max(0.0, -numbers["least_margin"]) < 1e-12
    assert 0 <= numbers["largest_gap_of_worst_row"] < 1e-12
    assert of_rows_of_scores(3, "tiny")["rows of scores"] == numbers


def test_numbers_of_a_trigger_model_that_has_hardly_been_trained():
    numbers = ranmilo2026.trained_numbers("softmax", 0, layers=2, heads=2, cap=2)
    assert numbers["steps"] == 2
    assert numbers["sinking_heads"] == 0
    # Small maps attend evenly: the mean of 1/i over queries 2 to 16 but the trigger's, 8, is 0.1611.
    assert numbers["head_bos_weight_largest"] == pytest.approx(0.161, abs=0.005)


def test_the_relu_solution_is_measured_exactly(monkeypatch):
    monkeypatch.setattr(ranmilo2026, "trained_numbers", lambda *_, **fields: {"layers": fields.get("layers", 1)})
    numbers = ranmilo2026.of_relu(0, "small")
    assert numbers["solution"]["max_error"] < 1e-6
    assert numbers["solution"]["bos_weight_largest"] == 0.0
    assert numbers["several heads"] == {"layers": 4}


def test_course_of_a_run_that_diverged():
    def row(metric, step, value):
        return {"metric": metric, "step": step, "value": value, "layer": None, "key_position": None}

    table = pd.DataFrame(
        [
            *(row("train_loss", step, loss) for step, loss in ((10, 3.0), (20, 2.0), (30, 2.4), (40, 2.6), (50, float("nan")))),
            *(row("entropy", step, entropy) for step, entropy in ((10, 2.0), (30, 0.2), (50, float("nan")))),
        ]
    )
    assert course.of_diverged is True
    assert course(SimpleNamespace(table=table)) == {"least_loss": 2.0, "least_entropy": 0.2}


@pytest.fixture(scope="module")
def trained():
    """Random weights, BOS 0 in front of random rows."""
    model = model_like(num_hidden_layers=2, position={"name": "learned"}, initializer_range=0.3)
    rows = torch.randint(1, 40, (8, 64))
    rows[:, 0] = 0
    return read_like(model, rows)


def test_removal_of_bos_is_measured(trained):
    numbers = without_bos(trained)
    assert 0 < numbers["strongest"] < 1
    assert {"at_first_without", "at_first_replaced", "at_bos_moved", "at_first_moved"} < numbers.keys()
    assert {"loss_without", "loss_replaced", "loss_moved"} < numbers.keys()


# --- false sinks --------------------------------------------------------------------------------------------------------------


def rows_with_bos() -> torch.Tensor:
    rows = drawn_rows()
    rows[:, 0] = 0
    return rows


def test_a_sink_that_is_its_token_is_split_by_more_of_them():
    """Nine keys have the score of BOS and all others none, so that each has a ninth of nearly everything."""
    numbers = false_sinks(read_like(by_position(8.0, token=0), rows_with_bos()))
    assert numbers["first_beside_text"] > 0.99
    assert numbers["first_beside_bos"] == pytest.approx(1 / (COUNT + 1), rel=0.01)
    assert numbers["taken_by_bos"] == pytest.approx(COUNT / (COUNT + 1), rel=0.01)
    assert numbers["taken_by_repeated"] < 0.01
    # No value carries anything, so neither do weights, wherever they are.
    assert numbers["cost_of_bos"] == numbers["cost_of_repeated"] == 0.0


def test_a_sink_that_is_its_position_stays_whole():
    numbers = false_sinks(read_like(by_position(8.0), rows_with_bos()))
    assert numbers["first_beside_bos"] == pytest.approx(numbers["first_beside_text"], rel=1e-5)
    assert numbers["taken_by_bos"] < 0.01


def test_without_a_bos_there_are_no_further_ones():
    trained = read_like(by_position(8.0), drawn_rows())
    trained.bos = None
    assert not any("bos" in name for name in false_sinks(trained))


def test_an_even_head_of_an_encoder_is_no_sink_and_a_planted_one_is():
    torch.manual_seed(0)
    shape = dict(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = BertForMaskedLM(BertConfig(**shape, max_position_embeddings=64)).eval()
    rows = drawn_rows()
    rows[:, 0] = 1
    encoder = SimpleNamespace(special_ids={0, 1})
    loaded = SimpleNamespace(model=model, tokenizer=SimpleNamespace(mask_token_id=0), encoder=encoder)
    checkpoint = SimpleNamespace(loaded=loaded, draw=3, rows=lambda samples, seq_len: rows)
    attention = model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        for linear in (attention.query, attention.key):
            linear.weight.zero_()
            linear.bias.zero_()
    found = masked(checkpoint)["masked"]
    assert found["strongest_place"] == pytest.approx(1 / 64, rel=1e-4)
    assert -1.0 < found["gain_by_context"] < 0.0  # untrained, it is worse than frequencies
    with torch.no_grad():  # queries are one vector, and the key of the first token lies along it
        attention.query.bias[0] = 30.0
        attention.key.weight[0] = model.bert.embeddings(rows)[:, 0].mean(0)
    assert masked(checkpoint)["masked"]["strongest_place"] > 0.9
    with pytest.raises(DoesNotApply, match="it fills no gaps in a text"):
        masked(SimpleNamespace(loaded=SimpleNamespace(model=model_like(), tokenizer=None)))


def test_half_way_by_hand():
    assert half_way({10: 0.0, 20: 0.2, 40: 0.6, 80: 1.0}, 0.1) == 35.0  # 0.5 lies three quarters of the way from 20 to 40
    assert half_way({10: 3.0, 20: 1.0, 40: 1.0}, 0.1) == 15.0  # a curve may fall
    assert half_way({10: 0.0, 20: 5.0, 40: 1.0}, 0.1) == 11.0  # and overshoot
    assert half_way({10: 1.0, 20: 9.0, 40: 1.05}, 0.1) is None
    # A jump in warm-up is no onset: it comes back, and 0.5 lies half of the way from 0.25 to 0.75.
    assert half_way({10: 0.0, 20: 5.0, 40: 0.25, 80: 0.75, 160: 1.0}, 0.1) == 60.0


@pytest.mark.thorough
def test_a_first_token_in_full_precision_takes_the_spike_off_the_grid():
    """Of the embedded model, whose spike is at BOS: against a grid and a product made by hand for one map."""
    checkpoint = Checkpoint(load_model("embedded:softmax"), resolve_corpus("python_source"))
    numbers = eight_bits(checkpoint)
    seen = []
    site = checkpoint.loaded.model.layers[3].mlp.down_proj
    handle = site.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        checkpoint.loaded.model(input_ids=checkpoint.rows(CALIBRATION + TEXTS, 256)[:CALIBRATION], use_cache=False)
    handle.remove()
    assert numbers["baseline"]["largest_activation"] >= seen[0].abs().max().item() > 2 * seen[0][:, 1:].abs().max().item()
    assert numbers[PREFIX]["largest_activation"] < numbers["baseline"]["largest_activation"]
    assert 0 < numbers[PREFIX]["int8_gap"] < numbers["baseline"]["int8_gap"]


# --- the laws of repeated tokens ----------------------------------------------------------------------------------------------


def test_laws_hold_at_random_weights_and_are_refuted_by_single_numbers() -> None:
    claim = claims["repeated_token_laws"]()
    numbers = {seed: measure(seed, "tiny") for seed in range(3)}
    assert judge(claim.parts, claim.presupposes, numbers).verdict == "agrees with the proof"
    # The bounds are near enough to be broken by a wrong formula: half of the upper one is exceeded.
    assert all(found["rotary positions"]["over_bound"] > 0.5 for found in numbers.values())
    for label, metric, value in (
        ("no positions", "law_error", 1e-6),
        ("relative positions", "law_error", 1e-6),
        ("ALiBi", "law_error", 1e-6),
        ("rotary positions", "over_bound", 1.01),
        ("rotary positions", "under_bound", 1.01),
        ("learned positions", "law_error", 0.0),
    ):
        changed = {**numbers[0], label: {**numbers[0][label], metric: value}}
        found = judge(claim.parts, claim.presupposes, dict.fromkeys(range(40), changed))
        assert found.verdict == "contradicts the proof"


def rotary(operation: str, **fields) -> SinkLM:
    """A small model with random weights and rotary positions."""
    random = {"initialization": "normal", "initializer_range": 0.1}
    return model_like(position={"name": "rotary"}, operation={"name": operation}, **{**random, **fields})


def checkpoint_of(model: torch.nn.Module) -> Checkpoint:
    """As much of a checkpoint as the laws look at."""
    loaded = SimpleNamespace(model=model, device=torch.device("cpu"))
    return cast(Checkpoint, SimpleNamespace(loaded=loaded, draw=0, text_ids=torch.arange(40)))


@pytest.mark.parametrize("operation", ["sigmoid", "softmax_plus_one", "relu"])
def test_the_bounds_are_not_about_weights_that_are_no_softmax(operation: str) -> None:
    assert of_checkpoint(checkpoint_of(rotary("softmax")))["rotary positions"]["bound_violation"] == 0
    with pytest.raises(DoesNotApply, match="not the softmax of products of queries and keys over the tokens"):
        of_checkpoint(checkpoint_of(rotary(operation)))
    with pytest.raises(DoesNotApply, match="sees all tokens before it and none behind it"):
        of_checkpoint(checkpoint_of(rotary("softmax", window=16)))


def test_a_weight_that_float32_cannot_hold_is_not_below_its_bound() -> None:
    model = rotary("softmax", initializer_range=2.2)
    model.set_attn_implementation("eager")
    weights = torch.cat([model(torch.full((1, 64), token), output_attentions=True).attentions[0] for token in range(40)])
    assert bool((weights[..., torch.ones(64, 64).tril().bool()] == 0).any())  # with a score of a hundred less than the largest
    assert of_checkpoint(checkpoint_of(model))["rotary positions"]["bound_violation"] == 0


# --- the metric itself --------------------------------------------------------------------------------------------------------


def test_rates_of_a_sink_of_known_weight():
    """A score of s on the first key gives query t a weight of e^s / (e^s + t - 1) there; its mean decides each setting."""
    model = by_position(0.4)
    numbers = rates(read_like(model, drawn_rows()))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        first = model(drawn_rows(), output_attentions=True, use_cache=False).attentions[0][0, 0, :, 0]
    for threshold in THRESHOLDS:
        for length in ROW_LENGTHS:
            expected = 100.0 * bool(first[:length].mean() > threshold / 100)
            assert numbers[f"sink_rate_{threshold}_of_{length}"] == expected
    assert len(set(numbers.values())) > 1  # some settings see it and some do not
    at_usual = [numbers[f"sink_rate_30_of_{length}"] for length in ROW_LENGTHS]
    assert numbers["change_with_length"] == max(at_usual) - min(at_usual)


# --- random tokens, and what is carried -------- ------------------------------------------------------------------------------


def test_sinks_are_measured_on_rows_with_random_tokens_where_the_training_had_them(monkeypatch):
    seen = []
    numbers = dict.fromkeys(("sink_rate", "sink_rate_1", "sink_rate_max"), 1.0)
    monkeypatch.setattr(pretraining, "attention_numbers", lambda model, rows, front: seen.append(rows) or numbers)
    text, random = torch.full((8, 64), 7), RandomPositions(1, 3, np.arange(20, 40), seed=0)
    for drawn in (random, None):
        data = SimpleNamespace(train=SimpleNamespace(random=drawn))
        assert set(pretraining.as_trained(read_like(model_like(), text, data=data))) == {f"{n}_as_trained" for n in numbers}
    assert torch.equal(seen[1], text)  # and the text itself is as it was
    changed = seen[0] != text
    assert changed[:, 1:3].all()
    assert not changed[:, [0, *range(3, 64)]].any()
    assert set(seen[0][:, 1:3].flatten().tolist()) <= set(range(20, 40))
    assert len(seen[0][:, 1:3].unique(dim=0)) > 1


def carried_by(model: SinkLM) -> float:
    return carried(read_like(model, drawn_rows()))["carried_rate"]


@pytest.mark.parametrize("prefix", [0, 5])
def test_a_sink_is_carried_by_softmax_and_not_by_an_even_head(prefix):
    assert carried_by(by_position(8.0, prefix=prefix)) == 100.0
    assert carried_by(by_position(0.0, prefix=prefix)) == 0.0


def test_weights_of_a_half_on_every_key_are_no_sink():
    """Sigmoid of a score of 0; with one key high and the others low it is one, of a weight near 1."""
    sigmoid = {"name": "sigmoid"}
    assert carried_by(by_position(0.0, operation=sigmoid)) == 0.0
    assert carried_by(by_position(8.0, operation={**sigmoid, "bias": -8.0})) == 100.0
    assert carried_by(by_position(8.0, operation={**sigmoid, "bias": -8.0, "scale": 0.01})) == 100.0  # as of the output map
    # All the share of the rows, and hardly any weight: the proxy of the published rate would call it a sink.
    assert carried_by(by_position(8.0, operation={**sigmoid, "bias": -40.0})) == 0.0


@pytest.mark.parametrize(("bias", "expected"), [(-4.0, 0.0), (4.0, 100.0)])
def test_what_a_closed_gate_holds_back_is_not_carried(bias, expected):
    model = by_position(8.0, operation={"name": "gated", "element_wise": False, "initial_bias": bias})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(bias)
    assert carried_by(model) == expected


# --- a bias in the place of a sink --------------------------------------------------------------------------------------------


def said_by_the_sink(strength: float) -> SinkLM:
    """Position 0 has a key on which all queries rest, and its value says which four tokens the text has; nothing rotates."""
    model = by_position(8.0, tie_word_embeddings=False)
    attention = model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight[0, 0] = 1.0
        attention.o_proj.weight[2, 0] = strength
        model.lm_head.weight[2:6, 2] = 1.0
    return model


def texts_of(model: SinkLM) -> SimpleNamespace:
    """Sixteen rows of the four tokens, for a claim on checkpoints."""
    rows = torch.randint(2, 6, (16, 48), generator=torch.Generator().manual_seed(1))
    read = read_like(model, rows)
    read.loaded.operation = model.config.operation["name"]
    return read


def judged(model: SinkLM) -> str:
    claim = claims["sink_is_a_constant_bias"]()
    numbers = folded(cast(Checkpoint, texts_of(model)))
    return judge_model(claim.parts, claim.presupposes, dict.fromkeys(range(8), numbers)).verdict


def test_a_sink_whose_score_and_value_are_constants_is_a_bias_with_a_value():
    model = said_by_the_sink(4.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numbers = folded(cast(Checkpoint, texts_of(model)))
    of = {name: values["loss_change_folded"] for name, values in numbers.items()}
    assert of["constants"] == of["constant score"] == pytest.approx(0, abs=1e-6)
    assert numbers["constants"]["folded_share"] == 1
    assert min(of["no value"], of["nothing"]) > 0.5
    assert judged(model) == "reproduced"
    # Read-outs share the model.
    assert model.config.operation["name"] == "softmax"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_sink_that_says_nothing_or_none_at_all_is_not_what_the_claim_is_about():
    assert judged(said_by_the_sink(0.0)) == "not applicable"
    even = model_like(position={"name": "learned"}, initializer_range=1e-3)
    assert folded(cast(Checkpoint, texts_of(even))) == {"nothing": {"loss_change_folded": 0.0}}
    assert judged(even) == "not applicable"
    with pytest.raises(DoesNotApply, match="folded into softmax attention, and this model has sigmoid"):
        folded(cast(Checkpoint, texts_of(model_like(operation={"name": "sigmoid"}))))


def test_a_sink_without_which_nothing_changes_but_weights_needs_no_value():
    """Weights of the sink that fall on content cost something, and its own value does not."""
    numbers = {"nothing": {"loss_change_folded": 0.3}, "constants": {"loss_change_folded": 0.0, "folded_share": 1.0}}
    claim = claims["sink_is_a_constant_bias"]()
    seeds = {seed: {**numbers, "no value": {"loss_change_folded": 0.001 * seed}} for seed in range(4)}
    found = judge_model(claim.parts, claim.presupposes, seeds)
    assert (found.verdict, found.reason) == ("in part", "'without the value the loss is higher': not reproduced")
