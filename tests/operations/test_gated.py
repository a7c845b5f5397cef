"""Gated attention: gates by hand, every granularity, squeezing, and a gate that is open is softmax."""

from __future__ import annotations

import math

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab.attention.operation import HeadShape
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.operations.gated import Gated
from sinklab.operations.softmax import Softmax
from sinklab.probes.null_mass import NullMass
from sinklab.registry import operations
from sinklab.testing import check_operation

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=6, hidden_size=16)


@pytest.mark.parametrize(
    "operation",
    [
        Gated(element_wise=False, initial_bias=1.0),
        Gated(shared=True, floor=0.5),
        Gated(input_dependent=False),
        Gated(element_wise=False, shared=True, input_dependent=False),
        Gated(double=True),
    ],
    ids=str,
)
def test_contract(operation):
    check_operation(operation)


def test_three_tokens_by_hand():
    values = torch.tensor([[8.0], [16.0], [24.0]])[None, None]
    flat = torch.zeros(1, 1, 3, 1)
    # One feature that says how wide the gate opens: 3/4, 1/2, 1/4
    state = {"layer_input": torch.tensor([[[1.0], [0.0], [-1.0]]]), "weight": torch.full((1, 1, 1), math.log(3.0))}
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    outputs, weights = Gated().head_outputs(flat, flat, values, lower, 1.0, state)
    torch.testing.assert_close(outputs.flatten(), torch.tensor([6.0, 6.0, 4.0]), rtol=0, atol=1e-5)  # of means 8, 12, 16
    assert torch.equal(weights, Softmax().head_outputs(flat, flat, values, lower, 1.0)[1])
    squeezed = Gated(floor=0.5).gain(state).flatten()
    torch.testing.assert_close(squeezed, torch.tensor([0.875, 0.75, 0.625]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "weight", "bias", "gate"),
    [
        ({}, (4, 6, 16), None, (2, 4, 5, 6)),
        ({"initial_bias": -1.0}, (4, 6, 16), (4, 6), (2, 4, 5, 6)),
        ({"element_wise": False}, (4, 1, 16), None, (2, 4, 5, 1)),
        ({"shared": True}, (1, 6, 16), None, (2, 1, 5, 6)),
        ({"shared": True, "element_wise": False}, (1, 1, 16), None, (2, 1, 5, 1)),
        ({"input_dependent": False}, None, (4, 6), (1, 4, 1, 6)),
        ({"input_dependent": False, "element_wise": False, "initial_bias": 2.0}, None, (4, 1), (1, 4, 1, 1)),
    ],
)
def test_granularity(settings, weight, bias, gate):
    operation = Gated(**settings)
    values = operation.parameters(SHAPE)
    expected = {name: shape for name, shape in (("weight", weight), ("bias", bias)) if shape}
    assert {name: tuple(value.shape) for name, value in values.items()} == expected
    if bias:
        assert values["bias"].unique().tolist() == [settings.get("initial_bias", 0.0)]
    assert operation.gain(values | {"layer_input": torch.randn(2, 5, 16)}).shape == gate


def test_each_gate_reads_its_own_row():
    values, given = Gated(initial_bias=0.3).parameters(SHAPE), torch.randn(2, 5, 16)
    gate = Gated().gain(values | {"layer_input": given})
    expected = torch.sigmoid(given[1, 3] @ values["weight"][2, 4] + 0.3)
    torch.testing.assert_close(gate[1, 2, 3, 4], expected, rtol=0, atol=1e-6)


def test_an_open_gate_is_softmax():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8)
    operation = Gated(input_dependent=False, initial_bias=40.0)  # 1 - 4e-18
    shape = HeadShape(num_heads=4, num_kv_heads=4, head_dim=8, value_dim=8, hidden_size=16)
    outputs, _ = operation.head_outputs(queries, keys, values, None, 0.5, operation.parameters(shape))
    assert torch.equal(outputs, Softmax().head_outputs(queries, keys, values, None, 0.5)[0])


@pytest.mark.parametrize("settings", [{}, {"element_wise": False}, {"shared": True}, {"input_dependent": False}])
def test_a_doubled_gate_starts_as_softmax_and_opens_to_two(settings):
    queries, keys, values = torch.randn(3, 2, 4, 5, 8)
    operation = Gated(double=True, **settings)
    shape = HeadShape(num_heads=4, num_kv_heads=4, head_dim=8, value_dim=8, hidden_size=16)
    state = operation.parameters(shape) | {"layer_input": torch.randn(2, 5, 16)}
    outputs, _ = operation.head_outputs(queries, keys, values, None, 0.5, state)
    assert torch.equal(outputs, Softmax().head_outputs(queries, keys, values, None, 0.5)[0])
    assert operation.at_start == ""
    learned = "weight" if "weight" in state else "bias"
    wide = operation.gain(state | {learned: torch.full_like(state[learned], 40.0), "layer_input": torch.ones(2, 5, 16)})
    assert torch.equal(wide, torch.full_like(wide, 2.0))


@pytest.mark.parametrize("settings", [{}, {"shared": True}, {"element_wise": False, "input_dependent": False}])
def test_the_gate_of_a_model_is_measured_as_the_gain(settings):
    model = make_sinklm({"name": "gated", "initial_bias": math.log(3.0), **settings})
    for layer in model.layers:  # gates of 3/4 whatever is read
        layer.self_attn.operation_state.state_dict().get("weight", torch.zeros(1)).zero_()
    with torch.no_grad(), attend(model, probes=[NullMass()]) as session:
        model(input_ids=torch.arange(24).view(2, 12))
    table = session.table()
    gains = table[(table["metric"] == "output_gain") & table["head"].notna()]["value"].tolist()
    assert gains == pytest.approx([0.75] * 4, abs=1e-6)


@pytest.mark.parametrize("floor", [-0.1, 1.0, math.nan])
def test_a_floor_that_cannot_take_effect(floor):
    with pytest.raises(ConfigurationError, match=f"operation 'gated': floor = {floor} must be from 0 to below 1"):
        Gated(floor=floor)


def test_a_bias_that_cannot_take_effect():
    with pytest.raises(ConfigurationError, match="operation 'gated': initial_bias = inf must be a finite number"):
        Gated(initial_bias=math.inf)


@pytest.mark.parametrize("settings", [{"floor": 0.5}, {"initial_bias": 1.0}])
def test_a_doubled_gate_that_would_not_start_at_one(settings):
    with pytest.raises(ConfigurationError, match="operation 'gated': double goes with neither floor nor initial_bias"):
        Gated(double=True, **settings)


def test_round_trip():
    operation = Gated(element_wise=False, shared=True, floor=0.5, initial_bias=1.0)
    assert operations.make(operation.to_dict()) == operation
