"""Softpick: by hand, the gradient that negative scores have, and both ends: silence and softmax."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.operations.softmax import Softmax
from sinklab.operations.softpick import Softpick
from sinklab.registry import operations
from sinklab.testing import check_operation

CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()


def test_contract():
    check_operation(Softpick())


def test_three_tokens_by_hand():
    ratios = torch.tensor([[2.0, 9.0, 9.0], [3.0, 0.5, 9.0], [2.0, 4.0, 0.5]])
    scores = ratios.log()[None, None]
    # exp(s) - 1: 1; 2 and -1/2; 1, 3 and -1/2
    expected = torch.tensor([[1.0, 0.0, 0.0], [4 / 5, 0.0, 0.0], [2 / 9, 6 / 9, 0.0]])
    torch.testing.assert_close(Softpick().weights(scores, CAUSAL)[0, 0], expected, rtol=0, atol=1e-6)
    mass = Softpick().null_mass(scores, CAUSAL)[0, 0]
    torch.testing.assert_close(mass, torch.tensor([0.0, 1 / 5, 1 / 9]), rtol=0, atol=1e-6)


def test_a_negative_score_has_a_gradient_through_the_denominator():
    scores = torch.tensor([3.0, 0.5], dtype=torch.float64).log().requires_grad_()
    weight = Softpick().weights(scores[None, None, None], None)[0, 0, 0, 0]
    (gradient,) = torch.autograd.grad(weight, scores)
    # w = a/(a + b) with a = exp(s) - 1 = 2 and b = 1 - exp(t) = 1/2: dw/ds = 3 b/(a + b)², dw/dt = exp(t) a/(a + b)²
    assert gradient.tolist() == pytest.approx([3 * 0.5 / 6.25, 0.5 * 2 / 6.25])


def test_a_row_of_zeros_gives_everything_to_nothing():
    scores = torch.zeros(1, 1, 1, 4, requires_grad=True)
    weights = Softpick().weights(scores, None)
    assert torch.equal(weights, torch.zeros(1, 1, 1, 4))
    assert Softpick().null_mass(scores, None).item() == 1.0
    assert torch.equal(torch.autograd.grad(weights.sum(), scores)[0], torch.zeros(1, 1, 1, 4))
    assert Softpick().null_mass(torch.zeros(1, 1, 1, 2), torch.tensor([[False, False]])).item() == 1.0


def test_negative_rows_are_silent_and_large_rows_are_a_softmax():
    scores = torch.randn(1, 1, 4, 6, dtype=torch.float64)
    assert torch.equal(Softpick().weights(-scores.abs() - 1, None), torch.zeros_like(scores))
    for shift in (45.0, 900.0):  # exp(-40) is far below the rounding of what it is subtracted from
        torch.testing.assert_close(
            Softpick().weights(scores + shift, None), Softmax().weights(scores, None), rtol=0, atol=1e-12
        )


def test_small_scores_keep_their_digits():
    scores = 1e-6 * torch.tensor([[[[1.0, 3.0, -4.0]]]])
    # exp(s) - 1 = s but for s²/2
    torch.testing.assert_close(Softpick().weights(scores, None)[0, 0, 0], torch.tensor([1 / 8, 3 / 8, 0.0]), rtol=0, atol=1e-6)


def test_round_trip():
    assert operations.make({"name": "softpick"}) == Softpick()
    assert Softpick().normalized
    assert math.isclose(float(Softpick().weights(torch.ones(1, 1, 1, 1), None)), 1.0)
