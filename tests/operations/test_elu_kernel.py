"""The ELU kernel on three tokens, as a recurrence, and in its far corners."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sinklab.errors import ConfigurationError
from sinklab.operations.elu_kernel import EluKernel
from sinklab.registry import operations
from sinklab.testing import check_operation

CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
# elu(x) + 1 of these is 1, 2 and 1/2.
NUMBERS = torch.tensor([0.0, 1.0, -math.log(2.0)], dtype=torch.float64).view(1, 1, 3, 1)
VALUES = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).view(1, 1, 3, 1)


@pytest.mark.parametrize(
    ("normalize", "weights", "outputs"),
    [
        (True, [[1, 0, 0], [1 / 3, 2 / 3, 0], [2 / 7, 4 / 7, 1 / 7]], [1, 7, 142 / 7]),
        (False, [[0.5, 0, 0], [1, 2, 0], [0.25, 0.5, 0.125]], [0.5, 21, 17.75]),
    ],
)
def test_three_tokens_by_hand(normalize, weights, outputs):
    found, matrix = EluKernel(normalize=normalize).head_outputs(NUMBERS, NUMBERS, VALUES, CAUSAL, 0.5)
    torch.testing.assert_close(matrix[0, 0], torch.tensor(weights, dtype=torch.float64), atol=1e-15, rtol=0)
    torch.testing.assert_close(found.flatten(), torch.tensor(outputs, dtype=torch.float64), atol=1e-13, rtol=0)


@pytest.mark.parametrize("normalize", [False, True])
def test_is_a_recurrence_with_a_state(normalize):
    """Katharopoulos et al. 2020, eq. 16–20: a state of keys times values, and one of keys."""
    queries, keys, values = torch.randn(3, 1, 1, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state, total, expected = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), []
    for query, key, value in zip(F.elu(queries[0, 0]) + 1, F.elu(keys[0, 0]) + 1, values[0, 0], strict=True):
        state, total = state + torch.outer(key, value), total + key
        expected.append(query @ state / (query @ total) if normalize else 0.3 * query @ state)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    found, _ = EluKernel(normalize=normalize).head_outputs(queries, keys, values, visible, 0.3)
    torch.testing.assert_close(found[0, 0], torch.stack(expected), atol=1e-13, rtol=0)


def test_features_are_positive_and_keep_their_digits():
    numbers = torch.tensor([-20.0, -1.0, 0.0, 3.0]).requires_grad_()
    mapped, _ = EluKernel().features(numbers, numbers, {})
    torch.testing.assert_close(mapped, torch.tensor([math.exp(-20.0), math.exp(-1.0), 1.0, 4.0]), rtol=1e-6, atol=0)
    assert float(F.elu(numbers[0].detach()) + 1) == 0.0  # what the formula as written makes of the first in float32
    (slope,) = torch.autograd.grad(mapped.sum(), numbers)
    torch.testing.assert_close(slope, torch.tensor([math.exp(-20.0), math.exp(-1.0), 1.0, 1.0]), rtol=1e-6, atol=0)


def test_rows_sum_to_one_or_see_nothing():
    visible = torch.tensor([[True, False, False], [False, False, False], [True, False, True]])
    weights = EluKernel().weights(torch.rand(1, 2, 3, 3, generator=torch.Generator().manual_seed(0)), visible)
    torch.testing.assert_close(weights.sum(-1), torch.tensor([[[1.0, 0.0, 1.0]] * 2]))
    assert EluKernel().null_mass(torch.rand(1, 2, 3, 3), visible) is None


def test_normalized_follows_the_setting():
    assert EluKernel() == EluKernel(normalize=True)
    assert EluKernel().normalized
    assert not EluKernel(normalize=False).normalized
    assert not EluKernel().signed


def test_contract_without_normalisation():
    check_operation(EluKernel(normalize=False))


def test_unknown_setting():
    with pytest.raises(
        ConfigurationError, match=r"operation 'elu_kernel' has no setting 'normalise'; .* Did you mean 'normalize'"
    ):
        operations.make({"name": "elu_kernel", "normalise": True})
