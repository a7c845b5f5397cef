"""Sigmoid: hand-computed weights with and without bias, no competition between keys, parameters that survive a round trip."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.operations.sigmoid import Sigmoid


def test_three_tokens_by_hand():
    scores = torch.tensor([[0.0, 5.0, 5.0], [math.log(3.0), -math.log(3.0), 5.0], [0.0, 0.0, math.log(4.0)]])
    weights = Sigmoid().weights(scores[None, None], torch.ones(3, 3, dtype=torch.bool).tril())[0, 0]
    # sigmoid(ln x) = x/(1 + x)
    expected = torch.tensor([[0.5, 0.0, 0.0], [0.75, 0.25, 0.0], [0.5, 0.5, 0.8]])
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def test_bias_minus_log_n_makes_an_even_row_sum_to_about_one():
    size = 64
    weights = Sigmoid(bias=-math.log(size)).weights(torch.zeros(1, 1, 1, size), None)
    # sigmoid(-ln n) = 1/(n + 1), n of them
    assert float(weights.sum()) == pytest.approx(size / (size + 1), abs=1e-6)


def test_keys_do_not_compete():
    scores = torch.randn(1, 1, 1, 5)
    louder = scores.clone()
    louder[..., 2] += 10
    before, after = Sigmoid().weights(scores, None), Sigmoid().weights(louder, None)
    assert torch.equal(before[..., [0, 1, 3, 4]], after[..., [0, 1, 3, 4]])


def test_round_trip_of_name_and_parameters():
    operation = Sigmoid(bias=-2.5)
    assert operation.to_dict() == {"name": "sigmoid", "bias": -2.5}
    assert Operation.from_dict(operation.to_dict()) == operation
    with pytest.raises(ConfigurationError, match="operation 'sigmoid' has no parameter slope; its parameters: bias"):
        Operation.from_dict({"name": "sigmoid", "slope": 1.0})
