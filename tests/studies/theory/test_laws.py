"""Laws: the bound on the entropy of a row, and the weights of one token repeated under every position scheme."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from sinklab.errors import InputError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.studies.theory.laws import (
    alibi_weights,
    entropy_bound,
    head_entropy_bound,
    head_score_norm,
    least_entropy_scores,
    relative_weights,
    rotary_bounds,
    row_entropy,
    uniform_weights,
)

# Entropies of float64 softmaxes of up to 64 terms, each with an error of some 1e-16 times its logarithm (at most ~100).
ROUNDING = 1e-12


@pytest.mark.parametrize(("length", "sigma", "value"), [(8, 1, 1.97969), (64, 3, 3.68146), (64, 10, 0.02921)])
def test_published_figures_and_the_case_that_attains_them(length, sigma, value):
    assert entropy_bound(sigma, length).item() == pytest.approx(value, abs=5e-6)
    scores = least_entropy_scores(sigma, length)
    assert scores.norm().item() == pytest.approx(sigma, rel=1e-14)
    assert row_entropy(scores).item() == pytest.approx(entropy_bound(sigma, length).item(), abs=1e-14)


@given(st.integers(2, 64), st.floats(0, 30), st.floats(0, 1), st.integers(0, 2**31), st.floats(0.2, 8))
@settings(max_examples=200, deadline=None)
def test_never_violated_by_random_scores(length, sigma, share, seed, power):
    # High powers of normal numbers are peaked rows, near the worst case; low ones are flat.
    direction = torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    direction = direction.sign() * direction.abs() ** power
    scores = direction / direction.norm() * sigma * share
    assert row_entropy(scores).item() >= entropy_bound(sigma, length).item() - ROUNDING


@pytest.mark.parametrize(("length", "sigma"), [(2, 1.0), (3, 4.0), (6, 2.0), (9, 5.0)])
def test_a_search_for_less_entropy_finds_the_bound(length, sigma):
    def entropy(scores):
        centred = scores - scores.max()
        weights = np.exp(centred) / np.exp(centred).sum()
        return float(np.log(np.exp(centred).sum()) - weights @ centred)

    generator = np.random.default_rng(0)
    sphere = {"type": "ineq", "fun": lambda scores: sigma**2 - scores @ scores}
    least = min(
        minimize(entropy, generator.normal(size=length), constraints=[sphere], method="SLSQP", tol=1e-12).fun for _ in range(12)
    )
    # The search keeps to the sphere to 1e-6 or so, and stops when an entropy changes by less than 1e-12.
    assert least == pytest.approx(entropy_bound(sigma, length).item(), abs=1e-5)


@given(st.integers(1, 300), st.floats(0, 1e6), st.floats(0, 1e6))
@settings(deadline=None)
def test_range_and_direction(length, one, other):
    low, high = entropy_bound(max(one, other), length), entropy_bound(min(one, other), length)
    assert 0 <= low.item() <= high.item() + ROUNDING
    assert high.item() <= math.log(length) + ROUNDING


def test_large_sigma_and_no_scores_at_all():
    assert entropy_bound(0.0, 7).item() == pytest.approx(math.log(7), abs=1e-15)
    # T σ e^{-σ √(T/(T-1))} up to terms of order 1/σ.
    sigma, length = 200.0, 1000
    ratio = entropy_bound(sigma, length).item() / (length * sigma * math.exp(-sigma * math.sqrt(length / (length - 1))))
    assert ratio == pytest.approx(1.0, abs=1.5 / sigma)


def model_of(scheme: str) -> SinkLM:
    torch.manual_seed(0)
    config = SinkLMConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, initializer_range=0.3, position={"name": scheme},
    )  # fmt: skip
    model = SinkLM(config).double().eval()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(("scheme", "positions"), [("no_position", "none"), ("rotary", "rotary")])
@torch.no_grad()
def test_bound_holds_in_a_model(scheme, positions):
    model = model_of(scheme)
    tokens = torch.randint(30, (3, 12), generator=torch.Generator().manual_seed(1))
    entered = {}
    for index, layer in enumerate(model.layers):
        layer.input_layernorm.register_forward_hook(lambda _m, _i, output, index=index: entered.update({index: output}))
    attentions = model(tokens, output_attentions=True).attentions
    for index, layer in enumerate(model.layers):
        attention = layer.self_attn
        for head in range(2):
            rows = slice(8 * head, 8 * head + 8)
            maps = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
            bound = head_entropy_bound(*maps, entered[index], scaling=attention.scaling, positions=positions)
            weights = attentions[index][:, head]
            entropy = torch.special.entr(weights).sum(-1)
            assert bound.shape == entropy.shape
            assert (entropy >= bound - ROUNDING).all()
            assert (bound[:, 1:] > 0).all()


def test_score_norm_by_hand():
    # One dimension, W_Q = 2, W_K = 3, X = (1, 2)ᵀ: scores are 6 x_i x_j, rows of norm 6 √5 and 12 √5; σ = 6 · 5.
    two, three = torch.tensor([[2.0]]), torch.tensor([[3.0]])
    states = torch.tensor([[1.0], [2.0]])
    assert head_score_norm(two, three, states).item() == pytest.approx(30.0)
    assert head_score_norm(two, three, states, scaling=0.5).item() == pytest.approx(15.0)
    assert head_score_norm(two, three, states, positions="rotary").item() == pytest.approx(6 * 5**0.5 * 2)


@pytest.mark.parametrize("sigma", [-1.0, float("nan")])
def test_bad_input(sigma):
    with pytest.raises(InputError, match="sigma must be finite and at least 0"):
        entropy_bound(sigma, 4)


LENGTH, HEADS = 12, 4
# Biases are float32 in every model: an error of 6e-8 of a bias of at most 12, in the exponent.
FLOAT32 = 2e-6
EXACT = 1e-12


@torch.no_grad()
def run(scheme: str) -> tuple[SinkLM, torch.Tensor, torch.Tensor]:
    """A float64 model with large random weights, its attention ``(layers, heads, T, T)`` and its hidden states on one token."""
    torch.manual_seed(0)
    config = SinkLMConfig(
        vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.4, position={"name": scheme},
    )  # fmt: skip
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


SLOPES = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, dtype=torch.float64) / HEADS)
EXPECTED = {
    "no_position": lambda model: uniform_weights(LENGTH),
    "relative": lambda model: relative_weights(model.position.table[:LENGTH].T),  # distances below 16 have a bucket each
    "bucket_index": lambda model: relative_weights(torch.arange(LENGTH).double()),
    "alibi": lambda model: alibi_weights(SLOPES, LENGTH),
}


@pytest.mark.parametrize("scheme", EXPECTED)
def test_weights_of_one_token_repeated(scheme):
    model, weights, _ = run(scheme)
    expected = EXPECTED[scheme](model).expand_as(weights)
    torch.testing.assert_close(weights, expected, rtol=0, atol=EXACT if scheme == "no_position" else FLOAT32)


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


def test_rotary_bounds_by_hand_and_in_the_limit():
    lower, upper = rotary_bounds(0.5, 3)
    e = torch.e
    torch.testing.assert_close(upper, torch.tensor([1.0, e / (e + 1), e / (e + 2)], dtype=torch.float64))
    torch.testing.assert_close(lower, torch.tensor([1.0, 1 / (1 + e), 1 / (1 + 2 * e)], dtype=torch.float64))
    assert rotary_bounds(3.0, 10**6)[1][-1].item() < 5e-4
