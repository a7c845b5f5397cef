"""ReLU: by hand with each divisor, the construction that needs no sink, and where the mass of a silent row is."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.relu import Relu
from sinklab.registry import operations
from sinklab.testing import check_operation

CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
SCORES = torch.tensor([[2.0, 9.0, 9.0], [-1.0, 3.0, 9.0], [1.0, -4.0, 2.0]])[None, None]


@pytest.mark.parametrize("operation", [Relu(normalize=True), Relu(uncounted=1), Relu(power=0.5), Relu(power=0.0)])
def test_contract(operation):
    check_operation(operation)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (Relu(), [[2.0, 0.0, 0.0], [0.0, 3 / 2, 0.0], [1 / 3, 0.0, 2 / 3]]),
        (Relu(uncounted=1), [[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [1 / 2, 0.0, 1.0]]),
        (Relu(power=0.5), [[2.0, 0.0, 0.0], [0.0, 3 / 2**0.5, 0.0], [1 / 3**0.5, 0.0, 2 / 3**0.5]]),
        (Relu(power=0.0), [[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [1.0, 0.0, 2.0]]),
        (Relu(normalize=True), [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1 / 3, 0.0, 2 / 3]]),
    ],
)
def test_three_tokens_by_hand(operation, expected):
    torch.testing.assert_close(operation.weights(SCORES, CAUSAL)[0, 0], torch.tensor(expected), rtol=0, atol=1e-6)


def test_the_construction_that_needs_no_sink():
    """Ran-Milo: the trigger scores 1 on every key but BOS, so its weights average these keys; all other rows are silent."""
    scores = torch.zeros(1, 1, 6, 6)
    scores[..., 3, 1:] = 1.0
    weights = Relu(uncounted=1).weights(scores, torch.ones(6, 6, dtype=torch.bool).tril())[0, 0]
    expected = torch.zeros(6, 6)
    expected[3, 1:4] = 1 / 3
    assert torch.equal(weights, expected)


def test_the_divisor_counts_what_the_query_sees():
    visible = torch.tensor([[True, False, False, True], [False, False, False, False]])
    weights = Relu().weights(torch.ones(1, 1, 2, 4), visible)[0, 0]
    assert torch.equal(weights, torch.tensor([[0.5, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]]))


def test_the_mass_of_a_silent_row_is_on_nothing():
    silent = SCORES.clone()
    silent[..., 1, :2] = -1.0
    operation = Relu(normalize=True)
    assert operation.null_mass(silent, CAUSAL).tolist() == [[[0.0, 1.0, 0.0]]]
    assert operation.weights(silent, CAUSAL)[0, 0, 1].tolist() == [0.0, 0.0, 0.0]
    assert operation.null_mass(-silent.abs(), None).tolist() == [[[1.0, 1.0, 1.0]]]
    assert Relu().null_mass(silent, CAUSAL) is None
    assert (operation.normalized, Relu().normalized) == (True, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"uncounted": -1}, "uncounted is -1 and power is 1.0; expected an integer from 0 and a finite number"),
        ({"power": math.nan}, "uncounted is 0 and power is nan; expected an integer from 0 and a finite number"),
        ({"normalize": True, "uncounted": 1}, "normalize divides by the row sum, so uncounted and power, .* leave them out"),
        ({"normalize": True, "power": 0.5}, "normalize divides by the row sum, so uncounted and power, .* leave them out"),
        ({"uncounted": 1, "power": 0.0}, "uncounted has no effect when power is 0; leave it out"),
    ],
)
def test_settings_that_cannot_take_effect(settings, message):
    with pytest.raises(ConfigurationError, match=f"operation 'relu': {message}"):
        Relu(**settings)


def test_round_trip():
    assert operations.make({"name": "relu", "uncounted": 1}) == Relu(uncounted=1)
    assert operations.make(Relu(power=0.5).to_dict()) == Relu(power=0.5)
