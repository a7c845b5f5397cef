"""Softmax: hand-computed rows, and what it promises where nothing is visible."""

from __future__ import annotations

import math

import torch

from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


def test_three_tokens_by_hand():
    scores = torch.tensor([[0.0, 0.0, 0.0], [math.log(3.0), 0.0, 9.0], [math.log(2.0), math.log(5.0), math.log(3.0)]])
    weights = Softmax().weights(scores[None, None], torch.ones(3, 3, dtype=torch.bool).tril())[0, 0]
    # 1; 3 to 1; 2, 5 and 3 of 10
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.2, 0.5, 0.3]])
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def test_a_row_that_sees_nothing_gives_nothing():
    weights = Softmax().weights(torch.randn(1, 1, 2, 3), torch.tensor([[True, True, False], [False, False, False]]))
    assert torch.equal(weights[0, 0, 1], torch.zeros(3))
    assert weights[0, 0, 0, 2] == 0.0


def test_a_null_score_of_minus_infinity_is_no_null_score():
    """In a row that sees nothing, too: there is no mass to give, and no NaN forward or backward."""
    scores = torch.randn(1, 1, 3, 3, requires_grad=True)
    visible = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    null = torch.full((1, 1, 3), -math.inf)
    weights = Softmax().weights(scores, visible, null)
    torch.testing.assert_close(weights, Softmax().weights(scores, visible))
    weights[..., 0].sum().backward()
    assert bool(torch.isfinite(scores.grad).all())
    assert Softmax().null_mass(scores.detach(), visible, null).eq(0.0).all()
    assert Softmax().null_mass(scores.detach(), visible, torch.zeros(1, 1, 3))[0, 0, 1] == 1.0


def test_round_trip_of_name_and_parameters():
    assert Softmax().to_dict() == {"name": "softmax"}
    assert operations.make({}) == Softmax()
