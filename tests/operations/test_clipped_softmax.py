"""Clipped softmax: by hand in both forms, what clipping does to sums and gradients, and settings that contradict each other."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.clipped_softmax import ClippedSoftmax
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation

CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
SCORES = torch.tensor([[1.0, 9.0, 9.0], [3.0, 1.0, 9.0], [2.0, 5.0, 3.0]]).log()[None, None]
"""Softmax of the rows: 1; 3/4 and 1/4; 1/5, 1/2 and 3/10."""


@pytest.mark.parametrize("operation", [ClippedSoftmax(alpha=0.5), ClippedSoftmax(gamma=-0.1, zeta=1.2)])
def test_contract(operation):
    check_operation(operation)


@pytest.mark.parametrize(
    ("operation", "expected", "mass"),
    [
        # 3/2 p - 1/2
        (ClippedSoftmax(gamma=-0.5), [[1.0, 0.0, 0.0], [5 / 8, 0.0, 0.0], [0.0, 1 / 4, 0.0]], [0.0, 3 / 8, 3 / 4]),
        # (1 + 1/2i) p - 1/2i
        (
            ClippedSoftmax(alpha=0.5),
            [[1.0, 0.0, 0.0], [11 / 16, 1 / 16, 0.0], [1 / 15, 5 / 12, 11 / 60]],
            [0.0, 1 / 4, 1 / 3],
        ),
        # 2 p
        (ClippedSoftmax(gamma=0.0, zeta=2.0), [[1.0, 0.0, 0.0], [1.0, 1 / 2, 0.0], [2 / 5, 1.0, 3 / 5]], None),
    ],
)
def test_three_tokens_by_hand(operation, expected, mass):
    torch.testing.assert_close(operation.weights(SCORES, CAUSAL)[0, 0], torch.tensor(expected), rtol=0, atol=1e-6)
    found = operation.null_mass(SCORES, CAUSAL)
    assert operation.normalized == (mass is not None) == (found is not None)
    if mass is not None:
        torch.testing.assert_close(found[0, 0], torch.tensor(mass), rtol=0, atol=1e-6)


def test_without_a_stretch_it_is_softmax():
    torch.testing.assert_close(ClippedSoftmax(gamma=0.0).weights(SCORES, CAUSAL), Softmax().weights(SCORES, CAUSAL))
    assert torch.equal(ClippedSoftmax(alpha=0.0).weights(SCORES, CAUSAL), ClippedSoftmax(gamma=0.0).weights(SCORES, CAUSAL))


def test_alpha_counts_what_the_query_sees():
    visible = torch.tensor([[True, False, True, True, False]])
    scores = torch.randn(1, 1, 1, 5, dtype=torch.float64)
    alone = ClippedSoftmax(alpha=0.5).weights(scores[..., [0, 2, 3]], None)
    torch.testing.assert_close(ClippedSoftmax(alpha=0.5).weights(scores, visible)[..., [0, 2, 3]], alone)


def test_clipped_weights_have_no_gradient():
    scores = SCORES[:, :, 1:2, :2].clone().requires_grad_()
    weights = ClippedSoftmax(gamma=-0.5).weights(scores, None)
    assert torch.equal(torch.autograd.grad(weights[..., 1].sum(), scores)[0], torch.zeros(1, 1, 1, 2))


def test_no_row_sums_to_more_than_one():
    scores = 3 * torch.randn(1, 2, 64, 40, dtype=torch.float64)
    for operation in (ClippedSoftmax(), ClippedSoftmax(gamma=-2.0), ClippedSoftmax(alpha=4.0)):
        rows = operation.weights(scores, None).sum(-1)
        assert float(rows.max()) <= 1.0 + 1e-12
        torch.testing.assert_close(rows + operation.null_mass(scores, None), torch.ones_like(rows))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": -0.1, "alpha": 2.0}, "gamma is -0.1 and alpha, which stands for it, is 2.0; give one"),
        ({"gamma": 0.1}, "gamma is 0.1, alpha is None and zeta is 1.0; expected finite numbers, gamma at most 0"),
        ({"alpha": -1.0}, "alpha is -1.0 and zeta is 1.0; expected finite numbers, gamma at most 0, alpha at least 0"),
        ({"zeta": 0.9}, "zeta is 0.9; expected finite numbers, gamma at most 0, alpha at least 0 and zeta at least 1"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"alpha": math.inf}, "alpha is inf"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ConfigurationError, match=f"operation 'clipped_softmax': .*{message}"):
        ClippedSoftmax(**settings)


def test_round_trip():
    assert operations.make({"name": "clipped_softmax", "alpha": 2}) == ClippedSoftmax(alpha=2)
    assert operations.make(ClippedSoftmax().to_dict()) == ClippedSoftmax()
