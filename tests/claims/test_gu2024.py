"""Claims of Gu et al. 2024: the laws of repeated tokens, and what is measured, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from tests.claims.planted_models import by_position, drawn_rows, model_like, read_like

from sinklab.errors import DoesNotApply
from sinklab.models.language_model import SinkLM
from sinklab.registry import claims
from sinklab.training.rows import RandomPositions
from sinklab_claims import gu2024_pretraining as pretraining
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.gu2024_laws import measure, of_checkpoint
from sinklab_claims.gu2024_models import LENGTHS, OTHERS, THRESHOLDS, USUAL, SameOrder, rates
from sinklab_claims.gu2024_pretraining import ExcessOfOldest, excess_weights
from sinklab_claims.numbers.attention import carried
from sinklab_claims.verdict.rule import judge

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


def test_order_of_models_by_hand():
    effect = SameOrder("usual", ("other", "third"), ("a", "b", "c"))

    def of(*columns):
        return {label: dict(zip(("usual", "other", "third"), values, strict=True)) for label, *values in columns}

    assert effect(of(("a", 0, 1, 5), ("b", 10, 2, 7), ("c", 30, 3, 9))) == 1.0
    # b and c change places in the third, one of three pairs; a and b in no order by it would be another.
    assert effect(of(("a", 0, 1, 5), ("b", 10, 2, 9), ("c", 30, 3, 7))) == pytest.approx(2 / 3)
    assert effect(of(("a", 0, 1, 5), ("b", 10, 2, 5), ("c", 30, 3, 9))) == pytest.approx(2 / 3)
    # Four points are no order, so nothing is left of a and b.
    assert effect(of(("a", 6, 9, 9), ("b", 10, 1, 1), ("c", 30, 10, 10))) == 1.0
    assert effect(of(("a", 6, 9, 9), ("b", 7, 1, 1), ("c", 8, 0, 0))) is None
    assert (effect.unit, len(effect.needs())) == ("fraction", 9)


def test_rates_of_a_sink_of_known_weight():
    """A score of s on the first key gives query t a weight of e^s / (e^s + t - 1) there; its mean decides each setting."""
    model = by_position(0.4)
    numbers = rates(read_like(model, drawn_rows()))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        first = model(drawn_rows(), output_attentions=True, use_cache=False).attentions[0][0, 0, :, 0]
    for threshold in THRESHOLDS:
        for length in LENGTHS:
            expected = 100.0 * bool(first[:length].mean() > threshold / 100)
            assert numbers[f"sink_rate_{threshold}_of_{length}"] == expected
    assert 0 < sum(numbers[name] for name in (USUAL, *OTHERS)) < 900  # some settings see it and some do not
    at_usual = [numbers[f"sink_rate_30_of_{length}"] for length in LENGTHS]
    assert numbers["change_with_length"] == max(at_usual) - min(at_usual)


# --- windows, random tokens, and what is carried ------------------------------------------------------------------------------


def test_excess_of_weights_by_hand():
    """A window of 2 and three queries. Head 1 looks at the oldest key that it sees, head 2 at all evenly, head 3 at itself."""
    oldest = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    even = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    own = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    for heads, expected in (([oldest], 1.0), ([even], 0.0), ([own], -1.0), ([oldest, even], 0.5)):
        weights = torch.tensor(heads)[None]
        watcher = ExcessOfOldest(window=2)
        call = SimpleNamespace(
            weights=lambda start, stop, weights=weights: weights[:, :, start:stop],
            blocks=lambda: [(0, 2), (2, 3)],  # the last query is in a block of its own
        )
        watcher.update(call, None)
        assert watcher.by_query[0][1:].tolist() == [expected, expected]


def test_a_model_that_attends_evenly_has_no_excess():
    model = model_like(window=8, num_hidden_layers=2)
    for name, weight in model.named_parameters():
        if "q_proj" in name:
            weight.data.zero_()
    # Float32 weights of at most 1, off by a few units of 6e-8, over 1 - 1/n of at least a half.
    none = pytest.approx(0, abs=1e-6)
    assert excess_weights(read_like(model, drawn_rows(8))) == {"excess_of_first": none, "excess_inside": none}
    assert excess_weights(read_like(model_like(window=1), drawn_rows(8))) == {}


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
