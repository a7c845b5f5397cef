"""Sigmoid: by hand with and without biases and normalisation, no competition between keys, a length bias that counts keys."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation

CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "operation",
    [Sigmoid(bias=-2.0), Sigmoid(length_bias=True, bias=0.5), Sigmoid(normalize=True), Sigmoid(bias=1, normalize=True)],
)
def test_contract(operation):
    check_operation(operation)


def test_three_tokens_by_hand():
    scores = torch.tensor([[0.0, 5.0, 5.0], [math.log(3.0), -math.log(3.0), 5.0], [0.0, 0.0, math.log(4.0)]])[None, None]
    # sigmoid(ln x) = x/(1 + x)
    expected = torch.tensor([[0.5, 0.0, 0.0], [0.75, 0.25, 0.0], [0.5, 0.5, 0.8]])
    torch.testing.assert_close(Sigmoid().weights(scores, CAUSAL)[0, 0], expected, rtol=0, atol=1e-6)
    shares = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(Sigmoid(normalize=True).weights(scores, CAUSAL)[0, 0], shares, rtol=0, atol=1e-6)


def test_bias_minus_log_n_makes_an_even_row_sum_to_about_one():
    size = 64
    weights = Sigmoid(bias=-math.log(size)).weights(torch.zeros(1, 1, 1, size), None)
    # sigmoid(-ln n) = 1/(n + 1), n of them
    assert float(weights.sum()) == pytest.approx(size / (size + 1), abs=1e-6)
    assert torch.allclose(Sigmoid(length_bias=True).weights(torch.zeros(1, 1, 1, size), None), weights)


def test_the_length_bias_counts_what_the_query_sees():
    visible = torch.tensor([[True, False, False, False], [True, True, False, True], [False, False, False, False]])
    weights = Sigmoid(length_bias=True).weights(torch.zeros(1, 1, 3, 4), visible)[0, 0]
    expected = torch.tensor([[1 / 2, 0, 0, 0], [1 / 4, 1 / 4, 0, 1 / 4], [0, 0, 0, 0]])
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-7)


def test_keys_do_not_compete():
    scores = torch.randn(1, 1, 1, 5)
    louder = scores.clone()
    louder[..., 2] += 10
    before, after = Sigmoid().weights(scores, None), Sigmoid().weights(louder, None)
    assert torch.equal(before[..., [0, 1, 3, 4]], after[..., [0, 1, 3, 4]])


def test_normalised_low_scores_are_a_softmax():
    # sigmoid(s) is exp(s) but for a factor of 1 - exp(s), and rows of exp(-500) do not underflow.
    scores = torch.randn(1, 1, 3, 5, dtype=torch.float64)
    for low in (-40.0, -500.0):
        torch.testing.assert_close(Sigmoid(normalize=True).weights(scores + low, None), Softmax().weights(scores + low, None))
    assert Sigmoid(normalize=True).weights(scores.float() - 500, None).sum(-1).allclose(torch.ones(1))


def test_only_normalised_rows_have_a_fixed_sum():
    assert not Sigmoid().normalized
    assert Sigmoid(normalize=True).normalized
    assert Sigmoid().null_mass(torch.zeros(1, 1, 2, 2), None) is None


def test_a_bias_that_is_no_number():
    with pytest.raises(ConfigurationError, match="operation 'sigmoid': bias is inf; expected a finite number"):
        Sigmoid(bias=math.inf)


def test_round_trip_of_name_and_parameters():
    operation = Sigmoid(bias=-2.5)
    assert operation.to_dict() == {"name": "sigmoid", "bias": -2.5, "length_bias": False, "normalize": False}
    assert operations.make(operation.to_dict()) == operation
    with pytest.raises(ConfigurationError, match="'sigmoid' has no setting 'slope'; it has bias, length_bias, normalize"):
        operations.make({"name": "sigmoid", "slope": 1.0})
