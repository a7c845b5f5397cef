"""Repeated tokens: the closed forms against random models of each position scheme, and absolute positions, where they fail."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.errors import InputError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.studies.theory.repeated_tokens import alibi_weights, relative_weights, rotary_bounds, uniform_weights

LENGTH, HEADS = 12, 4
# Biases are float32 in every model: an error of 6e-8 of a bias of at most 12, in the exponent.
FLOAT32 = 2e-6
EXACT = 1e-12


@torch.no_grad()
def run(scheme: str) -> tuple[SinkLM, torch.Tensor, torch.Tensor]:
    """A float64 model with large random weights, its attention ``(layers, heads, T, T)`` and its hidden states on one token."""
    torch.manual_seed(0)
    config = SinkLMConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.4,
        position={"name": scheme},
    )
    model = SinkLM(config).double().eval()
    model.set_attn_implementation("eager")
    output = model(torch.full((1, LENGTH), 7), output_attentions=True, output_hidden_states=True)
    return model, torch.cat(output.attentions), torch.stack(output.hidden_states)[:, 0]


@pytest.mark.parametrize("scheme", ["no_position", "relative", "bucket_index", "alibi", "rotary"])
def test_hidden_states_stay_equal(scheme):
    _, _, hidden = run(scheme)
    torch.testing.assert_close(hidden, hidden[:, :1].expand_as(hidden), rtol=0, atol=1e-9)


@pytest.mark.parametrize("scheme", ["sinusoid", "learned"])
def test_equality_fails_with_absolute_positions(scheme):
    _, weights, hidden = run(scheme)
    assert (hidden[0, 1:] - hidden[0, :1]).norm(dim=-1).min() > 1e-2
    assert (weights - uniform_weights(LENGTH)).abs().max() > 1e-2


def test_without_positions_uniform():
    _, weights, _ = run("no_position")
    torch.testing.assert_close(weights, uniform_weights(LENGTH).expand_as(weights), rtol=0, atol=EXACT)


def test_relative_bias():
    model, weights, _ = run("relative")
    # Distances below 16 have a bucket each.
    expected = relative_weights(model.position.table[:LENGTH].T)
    torch.testing.assert_close(weights, expected.expand_as(weights), rtol=0, atol=FLOAT32)


def test_bucket_index_grows_with_the_distance():
    _, weights, _ = run("bucket_index")
    expected = relative_weights(torch.arange(LENGTH).double())
    torch.testing.assert_close(weights, expected.expand_as(weights), rtol=0, atol=FLOAT32)
    counts = torch.arange(1, LENGTH + 1)
    assert (expected[:, 0] >= 1 / counts - EXACT).all()


def test_alibi():
    _, weights, _ = run("alibi")
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, dtype=torch.float64) / HEADS)
    torch.testing.assert_close(weights, alibi_weights(slopes, LENGTH).expand_as(weights), rtol=0, atol=FLOAT32)


def test_rotary_is_a_relative_bias_within_its_bounds():
    model, weights, _ = run("rotary")
    # Norms from the model's own queries and keys: rotations do not change them.
    entered = []
    for layer in model.layers:
        layer.input_layernorm.register_forward_hook(lambda _m, _i, output: entered.append(output[0, 0]))
    with torch.no_grad():
        model(torch.full((1, 1), 7))
    for index, (layer, state) in enumerate(zip(model.layers, entered, strict=True)):
        attention = layer.self_attn
        queries = attention.q_proj(state).view(HEADS, -1)
        keys = attention.k_proj(state).view(2, -1).repeat_interleave(HEADS // 2, dim=0)
        norms = queries.norm(dim=-1) * keys.norm(dim=-1) * attention.scaling
        lower, upper = rotary_bounds(norms, LENGTH)
        seen = weights[index].masked_select(torch.ones(LENGTH, LENGTH).tril().bool()).view(HEADS, -1)
        rows = torch.tril_indices(LENGTH, LENGTH)[0]
        assert (seen <= upper[:, rows] + EXACT).all()
        assert (seen >= lower[:, rows] - EXACT).all()
        # The last row says all: its scores by distance, up to a constant, give every other row.
        distances = weights[index, :, -1].flip(-1).log()
        torch.testing.assert_close(weights[index], relative_weights(distances), rtol=0, atol=EXACT)


@given(st.floats(1e-6, 20), st.integers(1, 40))
@settings(deadline=None)
def test_the_series_is_the_softmax(slope, length):
    plain = relative_weights(-slope * torch.arange(length).double())
    torch.testing.assert_close(alibi_weights(slope, length), plain, rtol=1e-9, atol=1e-15)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=30))
@settings(deadline=None)
def test_the_first_key_gets_less_than_its_share_unless_distance_pays(values):
    falling, rising = sorted(values, reverse=True), sorted(values)
    share = 1 / torch.arange(1, len(values) + 1).double()
    assert (relative_weights(torch.tensor(falling).double())[:, 0] <= share * (1 + EXACT)).all()
    assert (relative_weights(torch.tensor(rising).double())[:, 0] >= share * (1 - EXACT)).all()


@given(st.floats(0, 8), st.integers(1, 30), st.integers(0, 2**31))
@settings(deadline=None)
def test_rotary_bounds_hold_for_any_scores_within_reach(reach, length, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = reach * (2 * torch.rand(length, generator=generator, dtype=torch.float64) - 1)
    lower, upper = rotary_bounds(reach, length)
    weights = torch.softmax(scores, dim=0)
    assert (weights <= upper[-1] * (1 + EXACT)).all()
    assert (weights >= lower[-1] * (1 - EXACT)).all()


def test_rotary_bounds_by_hand_and_in_the_limit():
    lower, upper = rotary_bounds(0.5, 3)
    e = torch.e
    torch.testing.assert_close(upper, torch.tensor([1.0, e / (e + 1), e / (e + 2)], dtype=torch.float64))
    torch.testing.assert_close(lower, torch.tensor([1.0, 1 / (1 + e), 1 / (1 + 2 * e)], dtype=torch.float64))
    assert rotary_bounds(3.0, 10**6)[1][-1].item() < 5e-4


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: uniform_weights(0), "length 0 must be at least 1"),
        (lambda: relative_weights(torch.tensor([0.0, float("nan")])), "the bias has values that are not finite"),
        (lambda: alibi_weights(0.0, 3), "slopes must be positive; for 0 use uniform_weights"),
        (lambda: rotary_bounds(-1.0, 3), "norms must be finite and at least 0"),
    ],
    ids=["length", "bias", "slope", "norms"],
)
def test_bad_input(call, complaint):
    with pytest.raises(InputError, match=complaint):
        call()
