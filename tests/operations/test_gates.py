"""Gates on the outputs of heads: by hand, every granularity, an MLP as torch's own, and open gates that are softmax."""

from __future__ import annotations

import math

import pytest
import torch
from tests.conftest import make_sinklm
from torch import nn

from sinklab.attention.operation import HeadShape
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.operations.gated import Gated
from sinklab.operations.gated_heads import GatedHeads
from sinklab.operations.softmax import Softmax
from sinklab.probes.null_mass import NullMass

# --- gated -------------------------------------------------------------------------------------------------------------------
GATED = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=6, hidden_size=16)


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
    values = operation.parameters(GATED)
    expected = {name: shape for name, shape in (("weight", weight), ("bias", bias)) if shape}
    assert {name: tuple(value.shape) for name, value in values.items()} == expected
    if bias:
        assert values["bias"].unique().tolist() == [settings.get("initial_bias", 0.0)]
    assert operation.gain(values | {"layer_input": torch.randn(2, 5, 16)}).shape == gate


def test_each_gate_reads_its_own_row():
    values, given = Gated(initial_bias=0.3).parameters(GATED), torch.randn(2, 5, 16)
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


# --- gated_heads -------------------------------------------------------------------------------------------------------------
SLICED = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, hidden_size=24)


def test_three_tokens_by_hand_of_gated_heads():
    # Two heads of two features; the first opens with its second feature, the other with its first.
    given = torch.tensor([[[9.0, 1.0, -1.0, 9.0], [9.0, 0.0, 0.0, 9.0], [9.0, -1.0, 1.0, 9.0]]])
    state = {"layer_input": given, "weight": math.log(3.0) * torch.eye(2).flip(1), "bias": torch.zeros(2)}
    expected = torch.tensor([[0.75, 0.5, 0.25], [0.25, 0.5, 0.75]])
    torch.testing.assert_close(GatedHeads().gain(state)[0, :, :, 0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(GatedHeads(double=True).gain(state)[0, :, :, 0], 2 * expected, rtol=0, atol=1e-6)


def test_an_mlp_is_the_one_of_torch():
    torch.manual_seed(0)
    operation, given = GatedHeads(hidden=5), torch.randn(2, 7, 24, dtype=torch.float64)
    state = {name: torch.randn_like(value, dtype=torch.float64) for name, value in operation.parameters(SLICED).items()}
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
    [(GatedHeads(), 4 * (6 + 1)), (GatedHeads(hidden=5), 4 * (5 * (6 + 2) + 1)), (GatedHeads(all_features=True), 4 * (24 + 1))],
    ids=str,
)
def test_numbers_of_parameters(operation, count):
    assert sum(value.numel() for value in operation.parameters(SLICED).values()) == count


@pytest.mark.parametrize("settings", [{}, {"hidden": 4}, {"all_features": True}])
def test_every_gate_starts_at_the_opening(settings):
    state = GatedHeads(opening=0.25, **settings).parameters(SLICED) | {"layer_input": torch.randn(2, 5, 24)}
    torch.testing.assert_close(GatedHeads(**settings).gain(state), torch.full((2, 4, 5, 1), 0.25), rtol=0, atol=1e-6)


def test_a_doubled_gate_that_is_half_open_is_softmax():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8)
    operation = GatedHeads(double=True)
    state = operation.parameters(SLICED) | {"layer_input": torch.randn(2, 5, 24)}
    outputs, _ = operation.head_outputs(queries, keys, values, None, 0.5, state)
    assert torch.equal(outputs, Softmax().head_outputs(queries, keys, values, None, 0.5)[0])


def test_a_width_that_cannot_be_split():
    odd = HeadShape(num_heads=5, num_kv_heads=5, head_dim=8, value_dim=8, hidden_size=24)
    with pytest.raises(ConfigurationError, match="the 24 features of the layer's input cannot be split evenly among 5 heads"):
        GatedHeads().parameters(odd)
    assert GatedHeads(all_features=True).parameters(odd)["weight"].shape == (5, 24)
