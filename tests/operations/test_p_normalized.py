"""p-normalised: 3-4-5 by hand, the root of a tempered softmax, and scores of any size."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.p_normalized import PNormalized
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation


@pytest.mark.parametrize(
    "operation", [PNormalized(p=4.0), PNormalized(p=2.0, sigmoid=True), PNormalized(p=0.25, sigmoid=True)], ids=str
)
def test_contract(operation):
    check_operation(operation)


def test_three_tokens_by_hand():
    similarity = torch.tensor([[7.0, 1.0, 1.0], [3.0, 4.0, 1.0], [1.0, 4.0, 9.0]])
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    weights = PNormalized(p=2.0).weights(torch.log(similarity)[None, None], lower)[0, 0]
    torch.testing.assert_close(weights[:2], torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0]]), rtol=0, atol=1e-6)
    weights = PNormalized(p=0.5).weights(torch.log(similarity)[None, None], lower)[0, 0]
    torch.testing.assert_close(weights[2], torch.tensor([1.0, 4.0, 9.0]) / 36, rtol=0, atol=1e-6)  # (1 + 2 + 3)² = 36
    # sigmoid(ln 3) = 3/4, sigmoid(0) = 1/2: of squares, 9/16 and 4/16, the root is sqrt(13)/4
    scores = torch.tensor([[[[math.log(3.0), 0.0]]]])
    weights = PNormalized(p=2.0, sigmoid=True).weights(scores, None)[0, 0, 0]
    torch.testing.assert_close(weights, torch.tensor([3.0, 2.0]) / math.sqrt(13.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", [0.25, 0.5, 2.0, 4.0])
def test_it_is_the_root_of_a_tempered_softmax(p):
    scores = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    weights = PNormalized(p=p).weights(scores, None)
    torch.testing.assert_close(weights, Softmax().weights(p * scores, None) ** (1 / p), rtol=1e-12, atol=0)
    sums = weights.sum(-1)
    assert bool((sums < 1).all() if p < 1 else ((sums > 1) & (sums <= 6 ** (1 - 1 / p))).all())


@pytest.mark.parametrize("sigmoid", [False, True])
def test_powers_sum_to_one_at_any_size_of_the_scores(sigmoid):
    for size in (1.0, 1e2, 1e4):
        scores = size * torch.randn(2, 3, 5, 6, dtype=torch.float64)
        weights = PNormalized(p=3.0, sigmoid=sigmoid).weights(scores, None)
        torch.testing.assert_close((weights**3).sum(-1), torch.ones(2, 3, 5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_no_null_mass_is_defined():
    assert PNormalized().null_mass(torch.randn(1, 1, 3, 3), None) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p": 0.0}, r"p = 0\.0 must be a positive number"),
        ({"p": math.inf}, "p = inf must be a positive number"),
        ({"p": 1.0}, "p = 1 divides by the sum of the row, which is operation softmax; use that"),
        (
            {"p": 1.0, "sigmoid": True},
            "p = 1 divides by the sum of the row, which is operation sigmoid with its rows normalised",
        ),
    ],
)
def test_settings_that_cannot_take_effect(settings, message):
    with pytest.raises(ConfigurationError, match=f"operation 'p_normalized': {message}"):
        PNormalized(**settings)


def test_round_trip():
    assert operations.make({"name": "p_normalized", "p": 2.0, "sigmoid": True}) == PNormalized(p=2.0, sigmoid=True)
