"""The MLP kernel: one small network for queries and keys."""

from __future__ import annotations

import torch

from sinklab.attention.operation import HeadShape
from sinklab.operations.identity import Identity
from sinklab.operations.mlp_kernel import MlpKernel
from sinklab.registry import operations
from sinklab.testing import check_operation

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, hidden_size=256)
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()


def test_three_tokens_by_hand():
    # first = [[1], [-1]] keeps both signs apart; second = [[2, 3]] adds 2·relu(x) and 3·relu(-x): 1 -> 2, -1 -> 3, 2 -> 4.
    state = {
        "first": torch.tensor([[1.0, 0.0], [-1.0, 0.0]]),
        "second": torch.tensor([[2.0, 3.0], [0.0, 0.0]]),
    }
    numbers = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0]])[None, None]
    _, weights = MlpKernel().head_outputs(numbers, numbers, numbers, CAUSAL, 0.5, state)
    assert torch.equal(weights[0, 0], torch.tensor([[2.0, 0.0, 0.0], [3.0, 4.5, 0.0], [4.0, 6.0, 8.0]]))
    _, weights = MlpKernel(normalize=True).head_outputs(numbers, numbers, numbers, CAUSAL, 0.5, state)
    torch.testing.assert_close(weights[0, 0, 2], torch.tensor([4.0, 6.0, 8.0]) / 18)


def test_one_network_a_layer():
    torch.manual_seed(0)
    parameters = MlpKernel().parameters(SHAPE)
    assert {name: tuple(value.shape) for name, value in parameters.items()} == {"first": (64, 64), "second": (64, 64)}
    # 4096 normal numbers: their deviation is known to one part in 90, 1 / sqrt(2 · 4096); four times that is allowed.
    for value in parameters.values():
        assert abs(float(value.std()) / (0.4 / 64) ** 0.5 - 1) <= 4 / 90


def test_is_the_identity_kernel_of_the_mapped_states():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64)
    state = {"first": torch.randn(4, 4, dtype=torch.float64), "second": torch.randn(4, 4, dtype=torch.float64)}
    mapped = [torch.relu(states @ state["first"].T) @ state["second"].T for states in (queries, keys)]
    for normalize in (False, True):
        found, _ = MlpKernel(normalize=normalize).head_outputs(queries, keys, values, CAUSAL, 0.5, state)
        expected, _ = Identity(normalize=normalize).head_outputs(*mapped, values, CAUSAL, 0.5)
        torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)


def test_rows_are_not_normalized_either_way():
    for normalize in (False, True):
        operation = MlpKernel(normalize=normalize)
        assert operation.signed
        assert not operation.normalized
        assert operations.make(operation.to_dict()) == operation


def test_contract_with_normalisation():
    check_operation(MlpKernel(normalize=True))
