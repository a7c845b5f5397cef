"""ELU: by hand, against torch's own elu, and against softmax where all scores are negative."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sinklab.operations.elu import Elu
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation

CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()


def test_contract():
    check_operation(Elu(normalize=True))


def test_three_tokens_by_hand():
    scores = torch.tensor([[0.0, 7.0, 7.0], [-math.log(2.0), 1.0, 7.0], [-math.log(4.0), 0.0, 2.0]])[None, None]
    # exp(s) up to 0, s + 1 beyond
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.25, 1.0, 3.0]])
    torch.testing.assert_close(Elu().weights(scores, CAUSAL)[0, 0], expected, rtol=0, atol=1e-6)
    shares = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(Elu(normalize=True).weights(scores, CAUSAL)[0, 0], shares, rtol=0, atol=1e-6)


def test_it_is_elu_plus_one_with_the_digits_of_small_weights():
    scores = torch.linspace(-8, 8, 33)[None, None, None]
    torch.testing.assert_close(Elu().weights(scores, None), F.elu(scores) + 1, rtol=0, atol=1e-6)
    assert float(Elu().weights(torch.full((1, 1, 1, 1), -50.0), None)) == pytest.approx(math.exp(-50), rel=1e-5)


def test_normalised_negative_scores_are_a_softmax():
    scores = -torch.rand(1, 1, 4, 6, dtype=torch.float64) * 900
    torch.testing.assert_close(Elu(normalize=True).weights(scores, None), Softmax().weights(scores, None), rtol=0, atol=1e-13)


def test_only_normalised_rows_have_a_fixed_sum():
    assert (Elu().normalized, Elu(normalize=True).normalized) == (False, True)
    assert Elu().null_mass(torch.zeros(1, 1, 2, 2), None) is None


def test_round_trip():
    assert operations.make({"name": "elu", "normalize": True}) == Elu(normalize=True)
    assert operations.make(Elu().to_dict()) == Elu()


@pytest.mark.parametrize("number", [-20.0, -1.0, 0.0, 3.0])
def test_the_slope_is_one_from_zero_on(number):
    """At 0 itself too, where that of ``clamp`` is 1 or 0 by the version of torch."""
    scores = torch.full((1, 1, 1, 1), number, requires_grad=True)
    for values, slope in (
        (Elu().weights(scores, None), math.exp(min(number, 0.0))),
        (Elu().log_similarity(scores), 1 / (1 + max(number, 0.0))),
    ):
        (found,) = torch.autograd.grad(values.sum(), scores)
        assert float(found) == pytest.approx(slope, rel=1e-6)
