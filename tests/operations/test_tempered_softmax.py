"""Tempered softmax: the temperature by hand, its neutral value, and its place before the host's soft cap."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.softmax import Softmax
from sinklab.operations.tempered_softmax import TemperedSoftmax
from sinklab.registry import operations
from sinklab.testing import check_operation


def test_contract():
    check_operation(TemperedSoftmax(temperature=0.3))


def test_three_tokens_by_hand():
    queries, keys = torch.ones(1, 1, 3, 1), torch.log(torch.tensor([[1.0], [2.0], [3.0]]))[None, None]
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    _, weights = TemperedSoftmax(temperature=0.5).head_outputs(queries, keys, keys, lower, 1.0)
    expected = torch.tensor([[1.0, 0.0, 0.0], [1 / 5, 4 / 5, 0.0], [1 / 14, 4 / 14, 9 / 14]])  # squares
    torch.testing.assert_close(weights[0, 0], expected, rtol=0, atol=1e-6)


def test_it_divides_the_scores_before_they_are_capped():
    queries, keys, values = 3.0 * torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    outputs, _ = TemperedSoftmax(temperature=4.0).head_outputs(queries, keys, values, None, 0.5, softcap=2.0)
    expected, _ = Softmax().head_outputs(queries, keys, values, None, 0.125, softcap=2.0)
    assert torch.equal(outputs, expected)  # powers of two: nothing is rounded
    neutral, _ = TemperedSoftmax(temperature=1.0).head_outputs(queries, keys, values, None, 0.5)
    assert torch.equal(neutral, Softmax().head_outputs(queries, keys, values, None, 0.5)[0])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_cannot_take_effect(temperature):
    message = f"operation 'tempered_softmax': temperature = {temperature} must be a positive number"
    with pytest.raises(ConfigurationError, match=message):
        TemperedSoftmax(temperature=temperature)


def test_round_trip():
    assert operations.make({"name": "tempered_softmax", "temperature": 0.5}) == TemperedSoftmax(temperature=0.5)
