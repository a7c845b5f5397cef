"""Soft cap: by hand, as a host model's own cap, and the bound on a weight."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.softcap import Softcap
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation


def test_contract():
    check_operation(Softcap(cap=2.0))


def test_three_tokens_by_hand():
    # tanh(ln 2) = 3/5, tanh(ln 3) = 4/5
    scores = 10.0 * torch.log(torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 1.0], [1.0, 2.0, 3.0]]))[None, None]
    weights = Softcap(cap=10.0).weights(scores, torch.ones(3, 3, dtype=torch.bool).tril())[0, 0]
    last = torch.tensor([1.0, math.exp(6.0), math.exp(8.0)])
    expected = torch.stack((torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.5, 0.5, 0.0]), last / last.sum()))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def test_it_is_the_cap_of_a_host_model():
    queries, keys, values = 5.0 * torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    outputs, _ = Softcap(cap=3.0).head_outputs(queries, keys, values, None, 0.5)
    expected, _ = Softmax().head_outputs(queries, keys, values, None, 0.5, softcap=3.0)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-13)


def test_no_weight_exceeds_the_bound():
    scores = torch.full((1, 1, 1, 6), -1e4)
    scores[..., 2] = 1e4
    weights = Softcap(cap=1.5).weights(scores, None)
    assert float(weights.max()) == pytest.approx(1 / (1 + 5 * math.exp(-3.0)), abs=1e-6)
    assert Softcap().null_mass(scores, None) is None


@pytest.mark.parametrize("cap", [0.0, -50.0, math.nan, math.inf])
def test_a_cap_that_cannot_take_effect(cap):
    with pytest.raises(ConfigurationError, match=f"operation 'softcap': cap = {cap} must be a positive score"):
        Softcap(cap=cap)


def test_round_trip():
    assert operations.make({"name": "softcap", "cap": 30.0}) == Softcap(cap=30.0)
