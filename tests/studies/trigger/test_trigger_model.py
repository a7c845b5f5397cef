"""TriggerModel: the released layers by hand, exact solutions put in, residual, tokens in front, value maps, the null mass."""

from __future__ import annotations

import pytest
import torch

from sinklab.errors import ConfigurationError, UnknownNameError
from sinklab.operations.relu import Relu
from sinklab.operations.sink_token import SinkToken
from sinklab.operations.softmax import Softmax
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.registry import operations, positions
from sinklab.studies.theory.trigger_bounds import TriggerHeads
from sinklab.studies.theory.trigger_task import trigger_batch
from sinklab.studies.trigger.lab import as_released
from sinklab.studies.trigger.model import TriggerModel

WIDTH = LENGTH = 16


def batch_of(size=32, seed=0):
    return trigger_batch(size, LENGTH, WIDTH, torch.Generator().manual_seed(seed), dtype=torch.float64)


def model_of(operation, layers=1, heads=1, *, size=1.0):
    torch.manual_seed(0)
    model = TriggerModel(operation, layers, heads, WIDTH).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(size * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("operation", "attention"), [(Softmax(), "softmax"), (Relu(uncounted=1), "relu")])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_layer_is_that_of_the_paper(operation, attention, heads):
    model, inputs = model_of(operation, heads=heads, size=0.2), batch_of().inputs
    layer = model.layers[0]
    split = [linear.weight.detach().unflatten(0, (heads, WIDTH)) for linear in (layer.q_proj, layer.k_proj, layer.v_proj)]
    output = torch.stack(layer.o_proj.weight.detach().split(WIDTH, dim=1))
    expected, weights = TriggerHeads(*split, output, attention)(inputs)
    got, (seen,), _ = model.with_weights(inputs)
    torch.testing.assert_close(got, expected + (inputs if heads > 1 else 0), rtol=0, atol=1e-11)
    torch.testing.assert_close(seen, weights, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["softmax", "sigma_reparam"])
def test_value_output_is_what_outputs_are_made_with(name):
    model, inputs = model_of(as_released(name), heads=2).eval(), batch_of().inputs
    outputs, (weights,), _ = model.with_weights(inputs)
    maps = model.layers[0].value_output()
    assert maps.shape == (2, WIDTH, WIDTH)
    by_hand = torch.einsum("bhqk,hij,bkj->bqi", weights, maps, inputs)
    torch.testing.assert_close(outputs - inputs, by_hand, rtol=1e-9, atol=1e-9)


def test_tokens_in_front_are_seen_and_not_answered():
    model, inputs = model_of(SinkToken(count=2)), batch_of().inputs
    outputs, (weights,), _ = model.with_weights(inputs)
    assert outputs.shape == inputs.shape
    assert weights.shape[-1] == LENGTH + 2
    outputs.sum().backward()
    assert float(model.front.grad.abs().min()) > 0


def placed_in(name, *, operation=None, heads=1, layers=1):
    torch.manual_seed(0)
    model = TriggerModel(operation or Softmax(), layers, heads, WIDTH, LENGTH, name).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", positions.names())
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 3)])
def test_positions_do_what_their_formula_says(name, layers, heads):
    """Layers written out with the parts of the scheme, against the model."""
    model, inputs = placed_in(name, layers=layers, heads=heads), batch_of(4).inputs
    scheme, places = model.position, torch.arange(LENGTH)[None]
    offset = scheme.embed(torch.zeros_like(inputs), places)
    states, seen = inputs + offset, []
    for layer in model.layers:
        queries, keys, values = (
            linear(states).unflatten(-1, (heads, WIDTH)).transpose(1, 2)
            for linear in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        rotation, bias = scheme.rotation(places, states.dtype), scheme.score_bias(places, places)
        queries, keys = (queries, keys) if rotation is None else scheme.rotate(queries, keys, rotation)
        scores = queries @ keys.mT + (0 if bias is None else bias.double())
        seen.append(torch.softmax(scores.masked_fill(~torch.ones(LENGTH, LENGTH).bool().tril(), float("-inf")), -1))
        update = layer.o_proj((seen[-1] @ values).transpose(1, 2).flatten(2))
        states = states + update if model.residual else update
    # The answer is the token as it came plus the updates: what was added for the layers to read is taken off again.
    expected = states - offset if model.residual else states
    outputs, weights, _ = model.with_weights(inputs)
    # float64; rotary and sinusoid tables hold angles of float32 or better on both sides.
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(inputs), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.stack(weights), torch.stack(seen), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", ["alibi", "rotary", "learned"])
def test_null_mass_knows_of_positions(name):
    model, inputs = placed_in(name, operation=SoftmaxPlusOne()), batch_of(4).inputs
    _, (weights,), (mass,) = model.with_weights(inputs)
    torch.testing.assert_close(mass, 1 - weights.sum(-1), rtol=0, atol=1e-12)


def test_tokens_in_front_have_positions_of_their_own():
    model = TriggerModel(SinkToken(count=2), length=LENGTH, positions="learned")
    assert model.position.table.shape == (LENGTH + 2, WIDTH)
    model(batch_of(2).inputs.float()).sum().backward()
    assert float(model.position.table.grad.abs().amin()) > 0


def test_maps_start_alike_whatever_the_positions():
    starts = []
    for name in ("no_position", "learned"):
        torch.manual_seed(3)
        starts.append(TriggerModel(Softmax(), positions=name).layers[0].o_proj.weight)
    assert torch.equal(*starts)


@pytest.mark.parametrize("name", operations.names())
def test_every_operation_can_be_put_in(name):
    torch.manual_seed(0)
    model = TriggerModel(operations.make({"name": name}), 2, 2, WIDTH)
    inputs = batch_of(4).inputs.float()
    outputs = model(inputs)
    slow, weights, _ = model.with_weights(inputs)
    # float32 sums of up to 16 terms in another order, of values of order 1.
    torch.testing.assert_close(outputs, slow, rtol=0, atol=1e-5)
    outputs.square().mean().backward()
    assert outputs.isfinite().all()
    assert len(weights) == 2
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.numel()
    )


@pytest.mark.parametrize(
    ("fields", "message"), [({"layers": 0}, "layers 0"), ({"heads": 0}, "heads 0"), ({"width": 3}, "width 3")]
)
def test_refusals(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        TriggerModel(Softmax(), **fields)


def test_positions_that_cannot_be_are_refused():
    with pytest.raises(UnknownNameError, match=r"no position is called 'rotari'\. Did you mean 'rotary'"):
        TriggerModel(Softmax(), positions="rotari")
    with pytest.raises(ConfigurationError, match="position scheme 'sinusoid' needs an even hidden_size"):
        TriggerModel(Softmax(), width=5, positions="sinusoid")
