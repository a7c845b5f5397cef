"""Claims that nobody has written before: what they measure, by hand and on models that are planted with what they say."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from sinklab.attention.session import attend
from sinklab.claims._snapshots import ALONG
from sinklab.claims.false_sinks_in_a_prompt import COUNT, false_sinks
from sinklab.claims.gradient_sinks import gradient_numbers
from sinklab.claims.mass_thrown_on_content import Shares, _freed
from sinklab.claims.order_of_onset import half_way
from sinklab.claims.threshold_and_length import LENGTHS, OTHERS, THRESHOLDS, USUAL, SameOrder, rates
from sinklab.errors import DoesNotApply
from sinklab.interventions.hide_key import HideKey
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.read_outs.carried import carried
from sinklab.training.rows import TextRows
from sinklab.training.windowed import token_losses
from sinklab_claims.reproduce.cells import base_config, configure

SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.arange(2, 40)


def model_like(**fields) -> SinkLM:
    torch.manual_seed(0)
    return SinkLM(SinkLMConfig(**SHAPE, max_position_embeddings=64, **fields)).eval()


def read_like(model: SinkLM, rows: torch.Tensor, ids: torch.Tensor = IDS) -> SimpleNamespace:
    """What read-outs ask of a trained model."""
    return SimpleNamespace(
        loaded=SimpleNamespace(model=model),
        rows=lambda samples=100, seq_len=None: rows[:samples, :seq_len],
        text=lambda samples=100, seq_len=None: TextRows(rows[:samples, :seq_len]),
        front=0,
        bos=0,
        draw=0,
        text_ids=ids,
    )


def drawn_rows(samples: int = 32) -> torch.Tensor:
    return IDS[torch.randint(len(IDS), (samples, 64), generator=torch.Generator().manual_seed(1))]


def by_position(strength: float, token: int | None = None, **fields) -> SinkLM:
    """Learned positions alone, or one token alone, make the score of a key; no other query or key has any.

    The embedding has one coordinate for position 0 (or the token) and one that every token has.
    """
    model = model_like(position={"name": "learned"}, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        model.embed_tokens.weight[:, 1] = 1.0
        if token is None:
            next(p for name, p in model.named_parameters() if "position" in name)[0, 0] = 1.0
        else:
            model.embed_tokens.weight[token, 0] = 1.0
        attention = model.layers[0].self_attn
        attention.q_proj.weight[[0, 8], 1] = 1.0
        attention.k_proj.weight[[0, 8], 0] = strength
    return model


# --- threshold and length -----------------------------------------------------------------------------------------------------


def test_order_of_models_by_hand():
    over = ("a", "b", "c")
    effect = SameOrder("usual", ("other", "third"), over)

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


def test_rates_are_those_of_a_head_that_attends_evenly():
    """Query t has 1/t on the first key: 0.127, 0.093 and 0.074 over 32, 48 and 64 queries, below every threshold."""
    even = rates(read_like(by_position(0.0), drawn_rows()))
    assert set(even) == {USUAL, *OTHERS, "change_with_length"}
    assert set(even.values()) == {0.0}
    assert len(OTHERS) == len(THRESHOLDS) * len(LENGTHS) - 1


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


# --- weak content -------------------------------------------------------------------------------------------------------------


# --- the course of a training -------------------------------------------------------------------------------------------------


def test_half_way_by_hand():
    assert half_way({10: 0.0, 20: 0.2, 40: 0.6, 80: 1.0}, 0.1) == 35.0  # 0.5 lies three quarters of the way from 20 to 40
    assert half_way({10: 3.0, 20: 1.0, 40: 1.0}, 0.1) == 15.0  # a curve may fall
    assert half_way({10: 0.0, 20: 5.0, 40: 1.0}, 0.1) == 11.0  # and overshoot
    assert half_way({10: 1.0, 20: 9.0, 40: 1.05}, 0.1) is None
    # A jump in warm-up is no onset: it comes back, and 0.5 lies half of the way from 0.25 to 0.75.
    assert half_way({10: 0.0, 20: 5.0, 40: 0.25, 80: 0.75, 160: 1.0}, 0.1) == 60.0


@pytest.mark.parametrize("scale", ["tiny", "small", "60m"])
def test_models_are_kept_from_warm_up_steps_on(scale):
    config = base_config(scale)
    kept = configure(config, ALONG).training.snapshots
    assert kept[0] <= max(config.schedule.warmup_steps / 5, 1)
    assert kept[-1] == config.training.steps
    assert len(kept) == 16
    ratios = [after / before for before, after in itertools.pairwise(kept)]
    assert max(ratios) < 1.15 * min(ratios)  # whole steps, so not quite equal


def with_values(strength: float) -> SinkLM:
    """A planted sink on position 0, and random values that the loss depends on."""
    model = by_position(strength)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.embed_tokens.weight[:, 2:] = torch.randn(40, 14, generator=generator)
        for name in ("v_proj", "o_proj"):
            weight = getattr(model.layers[0].self_attn, name).weight
            weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return model


def test_gradients_of_keys_are_those_of_differences():
    model, rows, front = with_values(0.2).double(), drawn_rows(2)[:, :6], 0
    attention, step = model.layers[0].self_attn, 1e-4

    def loss(token: int, coordinate: int, by: float) -> torch.Tensor:
        def moved(module, args, output):
            output = output.clone()
            output[:, token, coordinate] += by
            return output

        handle = attention.k_proj.register_forward_hook(moved)
        with torch.no_grad():
            found = token_losses(model, rows).double().sum(1)  # of each row, which no other row's keys change
        handle.remove()
        return found

    slopes = torch.stack(
        [torch.stack([(loss(token, at, step) - loss(token, at, -step)) / (2 * step) for at in range(16)]) for token in range(6)]
    )  # (tokens, coordinates, rows)
    norms = slopes.unflatten(1, (2, 8)).norm(dim=2).mean(2).sum(1)
    expected = (norms[0] / norms[1:].mean()).item()
    # Losses are float32 in the end: differences of 1e-7 over 2e-4, of slopes of order 0.1.
    assert gradient_numbers(model, rows, front)["key_gradient"] == pytest.approx(expected, rel=0.02)


def test_gradients_gather_with_the_attention_and_not_beyond_it():
    rows = drawn_rows()
    even, sinking = (gradient_numbers(with_values(strength), rows, 0) for strength in (0.0, 6.0))
    # Of an even head the first of 64 keys receives 5 times the attention of the others, because more queries see it.
    assert sinking["key_gradient"] > 5 * even["key_gradient"] > 5 * 2
    assert all(0.5 < found["key_gradient_per_mass"] < 1 for found in (even, sinking))
    assert even.keys() == {"key_gradient", "key_gradient_per_mass"}  # with one layer no hidden state lies between two


def test_a_map_for_queries_keys_and_values_together_has_no_gradient_of_keys():
    config = GPTNeoXConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    with pytest.raises(DoesNotApply, match="no map for keys alone"):
        gradient_numbers(GPTNeoXForCausalLM(config).eval(), drawn_rows(), 0)


# --- objective and mechanism --------------------------------------------------------------------------------------------------


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


# --- where the weight of a hidden sink goes -----------------------------------------------------------------------------------


def test_the_weight_of_a_hidden_sink_falls_evenly_on_even_keys():
    """Query q gives q even keys what the sink had, w: three of them are first tokens, one is its own, q - 4 are content."""
    model, rows = by_position(0.4), drawn_rows(2)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weight = model(rows, output_attentions=True, use_cache=False).attentions[0][0, 0, :, 0].double()[4:]
    model.set_attn_implementation("sdpa")
    sums = []
    for edits in ((), (HideKey(place=0),)):
        shares = Shares(0)
        with torch.no_grad(), attend(model, (shares,), edits):
            model(rows, use_cache=False)
        sums.append(shares.sums)
    query = torch.arange(4, 64, dtype=torch.float64)
    lost = weight.sum()
    expected = {
        "freed_to_first": (3 * weight / query).sum() / lost,
        "freed_to_own": (weight / query).sum() / lost,
        "freed_to_content": ((query - 4) * weight / query).sum() / lost,
    }
    # Float32 weights off by 6e-8, over a weight lost of order 0.2.
    assert _freed(*sums) == pytest.approx({name: float(number) for name, number in expected.items()}, rel=1e-5)
