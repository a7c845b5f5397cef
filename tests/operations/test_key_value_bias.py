"""Key-value bias: one more key and value by hand and by concatenation, with gradients."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.attention.operation import HeadShape, repeat_groups
from sinklab.operations.key_value_bias import KeyValueBias
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation


def test_contract():
    check_operation(KeyValueBias(shared=True))


def test_three_tokens_by_hand():
    queries = torch.tensor([[0.0], [math.log(2.0)], [math.log(3.0)]])[None, None]
    keys, values = torch.zeros(1, 1, 3, 1), torch.tensor([[3.0], [6.0], [9.0]])[None, None]
    state = {"key": torch.ones(1, 1), "value": torch.tensor([[-6.0]])}
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    outputs, _ = KeyValueBias().head_outputs(queries, keys, values, lower, 1.0, state)
    # The bias weighs 1, 2 and 3 against ones: (3 - 6)/2, (3 + 6 - 12)/4, (3 + 6 + 9 - 18)/6
    torch.testing.assert_close(outputs.flatten(), torch.tensor([-1.5, -0.75, 0.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_it_is_softmax_over_one_more_key_and_value_of_each_query_head(shared):
    torch.manual_seed(0)
    heads = 1 if shared else 4
    state = {name: torch.randn(heads, 8, dtype=torch.float64) for name in ("key", "value")}
    given = [torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    results = []
    for concatenated in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (*given, *state.values())]
        queries, keys, values, key, value = leaves
        if concatenated:
            keys, values = (
                torch.cat((bias[None, :, None].expand(2, 4, 1, 8), repeat_groups(states, 2)), dim=2)
                for bias, states in ((key, keys), (value, values))
            )
            outputs, _ = Softmax().head_outputs(queries, keys, values, None, 0.5)
        else:
            outputs, _ = KeyValueBias(shared=shared).head_outputs(
                queries, keys, values, None, 0.5, {"key": key, "value": value}
            )
        results.append([outputs, *torch.autograd.grad(outputs.square().sum(), leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_parameters():
    shape = HeadShape(num_heads=40, num_kv_heads=8, head_dim=100, value_dim=60, hidden_size=16)
    torch.manual_seed(0)
    values = KeyValueBias().parameters(shape)
    assert {name: tuple(value.shape) for name, value in values.items()} == {"key": (40, 100), "value": (40, 60)}
    # 6400 numbers: their deviation is known to 0.9 %; four times that
    assert float(torch.cat([value.flatten() for value in values.values()]).std()) == pytest.approx(0.02, rel=0.036)
    assert KeyValueBias(shared=True).parameters(shape)["value"].shape == (1, 60)


def test_round_trip():
    assert operations.make({"name": "key_value_bias", "shared": True}) == KeyValueBias(shared=True)
