"""Gated heads: each head's slice by hand, an MLP as torch's own modules, numbers of parameters as published."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sinklab.attention.operation import HeadShape
from sinklab.errors import ConfigurationError
from sinklab.operations.gated_heads import GatedHeads
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, hidden_size=24)


@pytest.mark.parametrize("operation", [GatedHeads(hidden=4, opening=0.25), GatedHeads(all_features=True, double=True)], ids=str)
def test_contract(operation):
    check_operation(operation)


def test_three_tokens_by_hand():
    # Two heads of two features; the first opens with its second feature, the other with its first.
    given = torch.tensor([[[9.0, 1.0, -1.0, 9.0], [9.0, 0.0, 0.0, 9.0], [9.0, -1.0, 1.0, 9.0]]])
    state = {"layer_input": given, "weight": math.log(3.0) * torch.eye(2).flip(1), "bias": torch.zeros(2)}
    expected = torch.tensor([[0.75, 0.5, 0.25], [0.25, 0.5, 0.75]])
    torch.testing.assert_close(GatedHeads().gain(state)[0, :, :, 0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(GatedHeads(double=True).gain(state)[0, :, :, 0], 2 * expected, rtol=0, atol=1e-6)


def test_an_mlp_is_the_one_of_torch():
    torch.manual_seed(0)
    operation, given = GatedHeads(hidden=5), torch.randn(2, 7, 24, dtype=torch.float64)
    state = {name: torch.randn_like(value, dtype=torch.float64) for name, value in operation.parameters(SHAPE).items()}
    gate = operation.gain(state | {"layer_input": given})
    for head in range(4):
        mlp = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1)).double()
        mlp[0].weight.data, mlp[0].bias.data = state["hidden_weight"][head], state["hidden_bias"][head]
        mlp[2].weight.data, mlp[2].bias.data = state["weight"][head, None], state["bias"][head, None]
        expected = torch.sigmoid(mlp(given[..., 6 * head : 6 * head + 6]))
        torch.testing.assert_close(gate[:, head], expected.detach(), rtol=0, atol=1e-13)


def test_all_features():
    given, weight, bias = torch.randn(2, 7, 24), torch.randn(4, 24), torch.randn(4)
    gate = GatedHeads(all_features=True).gain({"layer_input": given, "weight": weight, "bias": bias})
    expected = torch.sigmoid(nn.functional.linear(given, weight, bias)).transpose(1, 2)[..., None]
    torch.testing.assert_close(gate, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("operation", "count"),
    [
        (GatedHeads(), 4 * (6 + 1)),
        (GatedHeads(hidden=5), 4 * (5 * (6 + 2) + 1)),
        (GatedHeads(all_features=True), 4 * (24 + 1)),
    ],
    ids=str,
)
def test_numbers_of_parameters(operation, count):
    assert sum(value.numel() for value in operation.parameters(SHAPE).values()) == count


@pytest.mark.parametrize("settings", [{}, {"hidden": 4}, {"all_features": True}])
def test_every_gate_starts_at_the_opening(settings):
    state = GatedHeads(opening=0.25, **settings).parameters(SHAPE) | {"layer_input": torch.randn(2, 5, 24)}
    torch.testing.assert_close(GatedHeads(**settings).gain(state), torch.full((2, 4, 5, 1), 0.25), rtol=0, atol=1e-6)


def test_a_doubled_gate_that_is_half_open_is_softmax():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8)
    operation = GatedHeads(double=True)
    state = operation.parameters(SHAPE) | {"layer_input": torch.randn(2, 5, 24)}
    outputs, _ = operation.head_outputs(queries, keys, values, None, 0.5, state)
    assert torch.equal(outputs, Softmax().head_outputs(queries, keys, values, None, 0.5)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": -1}, "hidden = -1 must be a number of units, or 0 for a linear gate"),
        ({"hidden": 4, "all_features": True}, "hidden and all_features exclude each other; an MLP reads the head's slice"),
        ({"opening": 0.0}, r"opening = 0\.0 must be between 0 and 1, both excluded"),
        ({"opening": 1.0}, r"opening = 1\.0 must be between 0 and 1, both excluded"),
    ],
)
def test_settings_that_cannot_take_effect(settings, message):
    with pytest.raises(ConfigurationError, match=f"operation 'gated_heads': {message}"):
        GatedHeads(**settings)


def test_a_width_that_cannot_be_split():
    odd = HeadShape(num_heads=5, num_kv_heads=5, head_dim=8, value_dim=8, hidden_size=24)
    with pytest.raises(ConfigurationError, match="the 24 features of the layer's input cannot be split evenly among 5 heads"):
        GatedHeads().parameters(odd)
    assert GatedHeads(all_features=True).parameters(odd)["weight"].shape == (5, 24)


def test_round_trip():
    operation = GatedHeads(hidden=4, opening=0.25, double=True)
    assert operations.make(operation.to_dict()) == operation
