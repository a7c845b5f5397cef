"""What the tests of paths share: a softmax with everything that a path may meet, calls of it, and results of two ways."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from sinklab.attention.operation import HeadShape, Inputs
from sinklab.attention.paths.table import compute
from sinklab.operations.softmax import Softmax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nothing(Softmax):
    """Softmax with what its state has: mapped queries, a null score by head or by query, a null value, a bias, a gate."""

    name: ClassVar[str] = "nothing"

    def features(self, queries, keys, state):
        return (queries * state["tempered"], keys) if "tempered" in state else (queries, keys)

    def null_scores(self, queries, scaling, state):
        if "key" in state:
            return torch.einsum("bhqd,hd->bhq", queries, state["key"].to(queries.dtype)) * scaling
        return state["logit"][None, :, None] if "logit" in state else state.get("scores")

    def null_value(self, state):
        return state.get("value")

    def output_bias(self, state):
        return state.get("bias")

    def gain(self, state):
        return state.get("gain")


def call(
    *, dtype=torch.float64, batch=2, heads=4, kv_heads=2, q_len=9, kv_len=9, dim=8, value_dim=None, visible=None, causal=None,
    scaling=0.5, device="cpu", **state,
):  # fmt: skip
    """A call of random tensors that take gradients; parts of the state are shapes, or one number for all heads."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    three = draw(batch, heads, q_len, dim), draw(batch, kv_heads, kv_len, dim), draw(batch, kv_heads, kv_len, value_dim or dim)
    made = {
        name: draw(*value) if isinstance(value, tuple) else torch.full((heads,), value, dtype=dtype, device=device)
        for name, value in state.items()
    }
    parameters = {name: tensor.detach().requires_grad_() for name, tensor in made.items()}
    return Inputs(*three, visible, visible is None if causal is None else causal, scaling, parameters)


def in_float64(inputs):
    """The same numbers in float64, which take gradients of their own."""
    wide = {name: getattr(inputs, name).detach().double().requires_grad_() for name in ("queries", "keys", "values")}
    state = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.state.items()}
    return dataclasses.replace(inputs, **wide, state=state)


def plain(operation, inputs):
    """Head outputs by the reference."""
    return operation.head_outputs(inputs.queries, inputs.keys, inputs.values, inputs.mask(), inputs.scaling, inputs.state)[0]


def results(operation, inputs, head_outputs):
    """Outputs, and the gradient of a random sum of them with respect to every tensor."""
    outputs = head_outputs(operation, inputs)
    weight = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(outputs.device, outputs.dtype)
    leaves = [inputs.queries, inputs.keys, inputs.values, *inputs.state.values()]
    return [outputs.detach(), *torch.autograd.grad(outputs, leaves, weight, materialize_grads=True)]


def relative_errors(operation, inputs, head_outputs):
    """Norm of the error over norm, of the outputs and of each gradient, against the plain path in float64."""
    pairs = zip(results(operation, inputs, head_outputs), results(operation, in_float64(inputs), plain), strict=True)
    return [float((one.double() - two).norm() / two.norm()) for one, two in pairs]


def run(operation, tensors, state, way, visible=None, causal=True):
    """Outputs, and gradients of a fixed functional with respect to queries, keys, values and the state."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (*tensors, *state.values())]
    inputs = Inputs(*leaves[:3], visible, causal, 0.25, dict(zip(state, leaves[3:], strict=True)))
    outputs, _ = compute(operation, inputs, way)
    target = torch.cos(torch.arange(outputs.numel())).to(outputs.dtype).view_as(outputs)
    return [outputs.detach(), *torch.autograd.grad((outputs * target).sum(), leaves, materialize_grads=True)]


def state_of(operation, q_len):
    """Learned parameters away from their start, and what enters the layer, for heads of 16 with values of 24."""
    shape = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=24, hidden_size=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = {
            name: value.double() + 0.3 * torch.randn(value.shape).double()
            for name, value in operation.parameters(shape).items()
        }
        if operation.needs_layer_input:
            state["layer_input"] = torch.randn(2, q_len, 64).double()
    return state


def holes(length, others):
    """A mask for each of two samples: half of all keys; a query that sees nothing; ``others`` hidden in the second."""
    visible = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(2)) > 0.5
    visible[0, 0, 3] = False
    visible[1, :, :, others:] = False
    return visible
