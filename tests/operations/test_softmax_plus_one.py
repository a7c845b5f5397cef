"""Softmax plus one: hand-computed rows and null mass, and the zero key with the zero value that it stands for."""

from __future__ import annotations

import math

import torch

from sinklab.operations.softmax import Softmax
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.registry import operations

LOWER = torch.ones(3, 3, dtype=torch.bool).tril()


def null_scores(heads: int = 1) -> torch.Tensor:
    return SoftmaxPlusOne().null_scores(torch.zeros(1, heads, 3, 4), 0.5, {})


def test_three_tokens_by_hand():
    scores = torch.tensor([[0.0, 9.0, 9.0], [math.log(3.0), 0.0, 9.0], [math.log(2.0), math.log(5.0), math.log(2.0)]])[
        None, None
    ]
    # 1 and the one; 3, 1 and the one; 2, 5, 2 and the one
    expected = torch.tensor([[0.5, 0.0, 0.0], [0.6, 0.2, 0.0], [0.2, 0.5, 0.2]])
    operation = SoftmaxPlusOne()
    torch.testing.assert_close(operation.weights(scores, LOWER, null_scores())[0, 0], expected, rtol=0, atol=1e-6)
    mass = operation.null_mass(scores, LOWER, null_scores())[0, 0]
    torch.testing.assert_close(mass, torch.tensor([0.5, 0.2, 0.1]), rtol=0, atol=1e-6)


def test_it_is_softmax_over_one_more_key_of_zeros():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    outputs, weights = SoftmaxPlusOne().head_outputs(queries, keys, values, None, 0.5)
    padded = [torch.cat((torch.zeros_like(states[:, :, :1]), states), dim=2) for states in (keys, values)]
    expected, full = Softmax().head_outputs(queries, *padded, None, 0.5)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(weights, full[..., 1:], rtol=0, atol=1e-14)


def test_a_row_that_sees_nothing_or_only_repulsive_keys_spends_everything_on_nothing():
    hidden = torch.zeros(1, 3, dtype=torch.bool)
    for scores, visible in ((torch.randn(1, 1, 1, 3), hidden), (torch.full((1, 1, 1, 3), -200.0), ~hidden)):
        assert float(SoftmaxPlusOne().weights(scores, visible, null_scores()).abs().max()) == 0.0
        assert float(SoftmaxPlusOne().null_mass(scores, visible, null_scores())) == 1.0


def test_a_small_null_mass_keeps_its_digits():
    mass = SoftmaxPlusOne().null_mass(torch.full((1, 1, 1, 2), 40.0), None, null_scores())
    assert abs(float(mass) / (math.exp(-40.0) / 2) - 1) < 1e-5


def test_round_trip():
    assert SoftmaxPlusOne().to_dict() == {"name": "softmax_plus_one"}
    assert operations.make({"name": "softmax_plus_one"}) == SoftmaxPlusOne()
