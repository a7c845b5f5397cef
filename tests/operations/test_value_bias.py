"""Value bias: softmax, then a vector on top."""

from __future__ import annotations

import torch

from sinklab.attention.operation import HeadShape
from sinklab.operations.softmax import Softmax
from sinklab.operations.value_bias import ValueBias
from sinklab.registry import operations
from sinklab.testing import check_operation


def test_contract():
    check_operation(ValueBias(shared=True))


def test_outputs_move_by_the_vector_and_weights_do_not():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    plain, weights = Softmax().head_outputs(queries, keys, values, None, 0.5)
    for heads in (4, 1):
        vector = torch.randn(heads, 8, dtype=torch.float64)
        outputs, same = ValueBias(shared=heads == 1).head_outputs(queries, keys, values, None, 0.5, {"value": vector})
        assert torch.equal(same, weights)
        assert torch.equal(outputs, plain + vector[None, :, None])


def test_nothing_is_spent_on_nothing():
    assert ValueBias().null_scores(torch.randn(1, 4, 5, 8), 0.5, {}) is None
    assert ValueBias().null_mass(torch.randn(1, 4, 5, 5), None) is None


def test_parameters_and_round_trip():
    shape = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=6, hidden_size=16)
    assert ValueBias().parameters(shape)["value"].shape == (4, 6)
    assert ValueBias(shared=True).parameters(shape)["value"].shape == (1, 6)
    assert operations.make({"name": "value_bias", "shared": True}) == ValueBias(shared=True)
