"""The linear path against the plain reference: outputs and every gradient, across chunk boundaries."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import pytest
import torch
from tests.attention.path_calls import call as a_call
from tests.attention.path_calls import plain, relative_errors

from sinklab.attention.paths import linear as path_linear
from sinklab.attention.paths.table import choose, compute
from sinklab.errors import ConfigurationError
from sinklab.operations.elu_kernel import EluKernel
from sinklab.operations.identity import Identity
from sinklab.operations.mlp_kernel import MlpKernel
from sinklab.operations.sigmoid import Sigmoid

KERNELS = [operation(normalize=normalize) for operation in (EluKernel, Identity, MlpKernel) for normalize in (False, True)]


@dataclass(frozen=True, kw_only=True)
class Gated(EluKernel):
    """A kernel with all that comes after the weights."""

    def output_bias(self, state):
        return state["bias"]

    def gain(self, state):
        return state["gain"]


def call(*, q_len=150, kv_len=None, causal=True, **settings):
    return a_call(q_len=q_len, kv_len=q_len if kv_len is None else kv_len, causal=causal, scaling=0.4, **settings)


def errors(operation, inputs, head_outputs=path_linear.head_outputs):
    return relative_errors(operation, inputs, head_outputs)


def state_for(operation, dim):
    return {"first": (dim, dim), "second": (dim, dim)} if isinstance(operation, MlpKernel) else {}


SHAPES = {
    "three chunks, the last one short": {},
    "one chunk": {"q_len": 20},
    "whole chunks": {"q_len": 128},
    "wide heads": {"q_len": 200, "dim": 66, "heads": 2},
    "one head a group": {"kv_heads": 4},
    "other value size": {"value_dim": 5},
    "fewer queries": {"q_len": 70, "kv_len": 150},
    "fewer keys": {"q_len": 150, "kv_len": 70},
    "no rule": {"causal": False, "q_len": 9, "kv_len": 150},
    "one query": {"causal": False, "q_len": 1, "kv_len": 30},
}


@pytest.mark.parametrize("operation", KERNELS, ids=lambda operation: f"{operation.name} {operation.normalize}")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_equals_plain_in_float64(operation, shape):
    inputs = call(**shape, **state_for(operation, shape.get("dim", 8)))
    # Sums over 150 keys of products of 66 numbers, in another order: some thousand roundings of 1e-16 and sums that cancel.
    assert max(errors(operation, inputs)) <= 1e-12


def test_bias_and_gain():
    inputs = call(bias=(4, 8), gain=(2, 4, 150, 1))
    assert max(errors(Gated(), inputs)) <= 1e-12


@pytest.mark.parametrize("operation", KERNELS, ids=lambda operation: f"{operation.name} {operation.normalize}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(operation, dtype):
    inputs = call(dtype=dtype, dim=16, value_dim=16, q_len=600, **state_for(operation, 16))
    # Rounding is that of the dtype, and no worse than on the plain path; signed rows whose sums nearly cancel are bad on both.
    unit = torch.finfo(dtype).eps
    for found, reference in zip(errors(operation, inputs), errors(operation, inputs, plain), strict=True):
        assert found <= 2 * max(reference, unit)


def test_gradcheck():
    inputs = call(q_len=66, dim=2, value_dim=2, heads=2, kv_heads=1)

    def outputs(queries, keys, values):
        changed = dataclasses.replace(inputs, queries=queries, keys=keys, values=values)
        return path_linear.head_outputs(EluKernel(), changed)

    assert torch.autograd.gradcheck(outputs, (inputs.queries, inputs.keys, inputs.values), fast_mode=True)


@pytest.mark.parametrize("operation", [EluKernel(), Identity(normalize=True)], ids=lambda operation: operation.name)
def test_the_future_does_not_even_round_the_past(operation):
    inputs = call(dtype=torch.float32)
    keys, values = inputs.keys.detach().clone(), inputs.values.detach().clone()
    keys[:, :, 70:] *= 1e6
    values[:, :, 70:] *= 1e6
    before = path_linear.head_outputs(operation, inputs)
    after = path_linear.head_outputs(operation, dataclasses.replace(inputs, keys=keys, values=values))
    assert torch.equal(before[:, :, :70], after[:, :, :70])
    assert not torch.equal(before[:, :, 70:], after[:, :, 70:])


def test_second_derivatives():
    """Unlike the kernels of the other paths, this one is ordinary autograd all the way down."""
    inputs = call(q_len=70, dim=2, value_dim=2)
    seconds = []
    for head_outputs in (path_linear.head_outputs, plain):
        (first,) = torch.autograd.grad(head_outputs(EluKernel(), inputs).square().sum(), inputs.keys, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), inputs.queries)[0])
    torch.testing.assert_close(*seconds, rtol=1e-9, atol=1e-9)


def test_row_sums_keep_their_digits_under_autocast():
    inputs = call(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = compute(EluKernel(), inputs, "linear")
    narrow = {name: getattr(inputs, name).bfloat16() for name in ("queries", "keys", "values")}
    assert torch.equal(found, path_linear.head_outputs(EluKernel(), dataclasses.replace(inputs, **narrow)))


def test_one_graph_under_compile():
    inputs = call()

    def outputs(queries):
        return path_linear.head_outputs(EluKernel(), dataclasses.replace(inputs, queries=queries))

    torch._dynamo.reset()
    found = torch.compile(outputs, fullgraph=True, backend="aot_eager")(inputs.queries)
    torch.testing.assert_close(found, outputs(inputs.queries), atol=1e-12, rtol=0)


def test_obstacles():
    inputs = call(q_len=5)

    def reason(operation, **changes):
        return path_linear.obstacle(operation, dataclasses.replace(inputs, **changes))

    assert reason(Identity()) is None
    assert reason(Identity(), causal=False) is None
    assert reason(Sigmoid()) == "its weights are not products of mapped queries and keys"
    assert reason(Identity(), visible=torch.ones(5, 5, dtype=torch.bool), causal=False) == (
        "sums over keys know the causal rule and no other mask"
    )
    assert reason(Identity(), queries=inputs.queries.half()) == "sums over keys leave the range of float16"
    assert reason(Identity(), softcap=30.0) == "the model caps its scores"
    with pytest.raises(ConfigurationError, match=re.escape("path 'linear' cannot serve operation 'sigmoid': its weights")):
        compute(Sigmoid(), inputs, "linear")


def test_what_is_worth_it():
    def chosen(**shape):
        return choose(Identity(), call(dtype=torch.float32, **shape))

    assert chosen(q_len=32) == "linear"
    assert chosen(q_len=31) == "plain"
    assert chosen(causal=False, q_len=16) == "linear"
    assert chosen(causal=False, q_len=1, kv_len=400) == "decode"
