"""Entropy bound: published figures, the case that attains it, no violation by random or adversarial scores, and a real head."""

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
from sinklab.studies.theory.entropy_bound import (
    entropy_bound,
    head_entropy_bound,
    head_score_norm,
    least_entropy_scores,
    row_entropy,
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


def test_entropy_of_a_masked_row():
    scores = torch.tensor([0.0, 0.0, float("-inf")])
    assert row_entropy(scores).item() == pytest.approx(math.log(2), abs=1e-15)


def model_of(scheme: str) -> SinkLM:
    torch.manual_seed(0)
    config = SinkLMConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        position={"name": scheme},
    )
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


def test_not_causal_rows_see_all_keys():
    maps = torch.eye(3)
    bound = head_entropy_bound(maps, maps, torch.eye(3), causal=False)
    torch.testing.assert_close(bound, entropy_bound(1.0, 3).expand(3), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: entropy_bound(-1.0, 4), "sigma must be finite and at least 0"),
        (lambda: entropy_bound(float("nan"), 4), "sigma must be finite and at least 0"),
        (lambda: entropy_bound(1.0, 0), "length 0 must be at least 1"),
        (lambda: least_entropy_scores(1.0, 1), "length 1 must be at least 2"),
        (lambda: head_score_norm(torch.ones(2, 3), torch.ones(2, 4), torch.ones(5, 3)), r"key_weight has shape \(2, 4\), exp"),
        (lambda: head_score_norm(torch.ones(2, 3), torch.ones(2, 3), torch.full((5, 3), math.inf)), "inputs has values"),
    ],
    ids=["negative", "nan", "length", "tight", "shape", "infinite"],
)
def test_bad_input(call, complaint):
    with pytest.raises(InputError, match=complaint):
        call()
