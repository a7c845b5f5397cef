"""The flash path against the plain reference: outputs and every gradient, with and without a null term."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re

import pytest
import torch
from tests.attention.path_calls import Nothing, call, holes, plain, relative_errors, results
from tests.conftest import make_sinklm
from torch._subclasses.fake_tensor import FakeTensorMode

from sinklab.attention.operation import Inputs
from sinklab.attention.paths import flash as path_flash
from sinklab.attention.paths.table import choose, compute, set_attention_path
from sinklab.attention.probe import Probe
from sinklab.attention.session import attend
from sinklab.attention.statistics.columns import LogSumExpCapture, column_statistics
from sinklab.errors import ConfigurationError
from sinklab.operations.sigmoid import Sigmoid

NOTHING = Nothing()


errors = functools.partial(relative_errors, NOTHING, head_outputs=path_flash.head_outputs)
flash = functools.partial(path_flash.head_outputs, NOTHING)


KEY, VALUE = (4, 8), (4, 8)
HOLES = holes(9, 5)

CALLS = {
    "softmax": {},
    "logit": {"logit": 0.3},
    "logit 20": {"logit": 20.0},
    "logit -20": {"logit": -20.0},
    "key": {"key": KEY},
    "key, value": {"key": KEY, "value": VALUE},
    "shared value": {"key": KEY, "value": (1, 8)},
    "all": {"tempered": (4, 1, 1), "key": KEY, "value": VALUE, "bias": (1, 8), "gain": (2, 4, 9, 1)},
    "one head a group": {"kv_heads": 4, "logit": 0.3},
    "no rule": {"causal": False, "key": KEY, "value": VALUE},
    "fewer queries": {"q_len": 4, "key": KEY},
    "fewer keys": {"kv_len": 4, "key": KEY},
    "decoding": {"q_len": 1, "kv_len": 13, "causal": False, "key": KEY, "value": VALUE},
    "holes": {"visible": HOLES, "key": KEY, "value": VALUE},
    "holes, no null term": {"visible": HOLES},
    "padding": {"visible": HOLES[:, :, 4:5], "logit": 0.3},
    "mask of two dimensions": {"visible": HOLES[1, 0], "logit": 0.3},
}


@pytest.mark.parametrize("settings", CALLS.values(), ids=list(CALLS))
def test_equals_plain_in_float64(settings):
    inputs = call(**settings)
    for found, expected in zip(results(NOTHING, inputs, path_flash.head_outputs), results(NOTHING, inputs, plain), strict=True):
        # Sums of 13 products of numbers below 10, some through an exponential: 1e-12 is thousands of roundings.
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("state", [{"logit": 0.3}, {"logit": 20.0}, {"key": (4, 8), "value": (4, 8)}], ids=str)
def test_gradcheck(state):
    inputs = call(q_len=3, kv_len=3, batch=1, **state)

    def outputs(queries, keys, values, *parameters):
        changed = {"queries": queries, "keys": keys, "values": values}
        return path_flash.head_outputs(
            NOTHING, dataclasses.replace(inputs, **changed, state=dict(zip(state, parameters, strict=True)))
        )

    assert torch.autograd.gradcheck(outputs, (inputs.queries, inputs.keys, inputs.values, *inputs.state.values()))


@pytest.mark.parametrize("masked", [False, True])
def test_rows_longer_than_a_tile_of_the_kernel_in_float32(masked):
    # The kernel works on 512 keys at a time; here whole tiles of it are hidden.
    visible = torch.ones(1, 1, 1100, 1100, dtype=torch.bool).tril() if masked else None
    if masked:
        visible[..., 500:1050] = False
        visible[:, :, 700:] = False
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 1100, "kv_len": 1100, "visible": visible}
    assert max(errors(call(dtype=torch.float32, key=(2, 8), value=(2, 8), **shape))) <= 1e-5


def test_bfloat16():
    # The kernel rounds weights, outputs and gradients, scaling and null value are one rounding each, and the null score is
    # rounded as a product of queries and key, which moves a weight by |score| · 2**-9 or so: a dozen roundings at the most.
    settings = {"dtype": torch.bfloat16, "q_len": 300, "kv_len": 300, "dim": 16}
    assert max(errors(call(**settings, key=(4, 16), value=(4, 16)))) <= 12 * 2.0**-9


def test_large_null_scores_leave_nothing_or_everything():
    sole = plain(NOTHING, call())
    for logit, share in ((80.0, 0.0), (-80.0, 1.0)):
        outputs = flash(call(logit=logit))
        torch.testing.assert_close(outputs, sole * share, atol=1e-12, rtol=0)


def test_gradient_through_the_log_sum_exp_of_the_kernel_would_be_wrong():
    """What the custom backward is for: the obvious expression gives the same outputs and other gradients."""
    inputs = call(logit=1.0)
    outputs, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        inputs.queries, inputs.keys, inputs.values, 0.0, True, scale=inputs.scaling
    )
    obvious = outputs * torch.sigmoid(log_sum - inputs.state["logit"][:, None])[..., None]
    ours = flash(inputs)
    torch.testing.assert_close(obvious, ours, atol=1e-12, rtol=0)
    wrong, right = (torch.autograd.grad(result.square().sum(), inputs.keys)[0] for result in (obvious, ours))
    assert float((wrong - right).norm() / right.norm()) > 0.05


def test_expanded_gradients_and_strided_inputs():
    inputs = call(logit=0.3)
    strided = {
        name: getattr(inputs, name).detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
        for name in ("queries", "keys", "values")
    }
    assert strided["queries"].stride(-1) != 1
    other = dataclasses.replace(inputs, **strided)
    for first, second in zip(
        torch.autograd.grad(flash(inputs).sum(), [inputs.queries, inputs.values]),
        torch.autograd.grad(flash(other).sum(), [other.queries, other.values]),
        strict=True,
    ):
        assert torch.equal(first, second)


def test_under_autocast_everything_meets_in_one_dtype():
    inputs = call(dtype=torch.float32, tempered=(4, 1, 1), key=KEY, value=VALUE)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = compute(NOTHING, inputs, "flash")  # features multiplies by a float32 parameter, which gives float32
        expected, _ = compute(NOTHING, inputs, "plain")
    assert found.dtype == torch.bfloat16
    # Weights and outputs are rounded here and there, each to 2**-9 of a value below 4.
    torch.testing.assert_close(found, expected, atol=8 * 2.0**-9 * 4, rtol=0)


def test_one_graph_under_compile():
    inputs = call(key=KEY, value=VALUE)

    def outputs(queries, key):
        return path_flash.head_outputs(
            NOTHING, dataclasses.replace(inputs, queries=queries, state={**inputs.state, "key": key})
        )

    torch._dynamo.reset()
    compiled = torch.compile(outputs, fullgraph=True, backend="aot_eager")
    arguments = (inputs.queries, inputs.state["key"])
    expected, found = outputs(*arguments), compiled(*arguments)
    assert torch.equal(found, expected)
    for one, two in zip(
        torch.autograd.grad(found.square().sum(), arguments),
        torch.autograd.grad(expected.square().sum(), arguments),
        strict=True,
    ):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0)


@pytest.mark.parametrize("what", ["linear", "square"])
def test_second_derivatives_are_refused(what):
    inputs = call(logit=0.3)
    outputs = flash(inputs)
    loss = outputs.sum() if what == "linear" else outputs.square().sum()
    (gradient,) = torch.autograd.grad(loss, inputs.queries, create_graph=True)
    with pytest.raises(ConfigurationError, match=r"first derivatives only, .*set_attention_path\(model, 'plain'\)"):
        gradient.sum().backward()


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_session_can_catch_the_log_sum_exp_of_real_keys(grad):
    inputs = call(logit=2.0)
    with grad(), LogSumExpCapture() as captured:
        flash(inputs)
    keys = inputs.keys.repeat_interleave(2, 1)
    scores = (inputs.queries @ keys.mT * inputs.scaling).masked_fill(~inputs.mask(), float("-inf"))
    assert captured.log_sum_exp is not None
    torch.testing.assert_close(captured.log_sum_exp, scores.logsumexp(-1).detach().float(), atol=1e-6, rtol=0)


class Keep(Probe):
    """The calls that a session describes."""

    name, needs, metrics = "keep", frozenset(), ()

    def __init__(self):
        self.calls = []

    def update(self, call, statistics):
        self.calls.append(call)

    def rows(self):
        return iter(())


@pytest.mark.parametrize("padded", [False, True])
def test_statistics_of_a_model_from_the_log_sum_exp_of_its_kernel(padded):
    model = make_sinklm({"name": "key_value_bias"})
    set_attention_path(model, "flash")
    tokens = torch.randint(0, 300, (2, 200), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :7] = 1 - padded
    keep = Keep()
    with torch.no_grad(), attend(model, [keep]):
        model(input_ids=tokens, attention_mask=mask)
    assert len(keep.calls) == 2
    for seen in keep.calls:
        assert seen.log_sum_exp is not None
        needs = frozenset({"columns", "mass", "entropy", "maximum"})
        fused, blocked = (column_statistics(seen, needs, method=method) for method in ("fused", "blocked"))
        for field in ("column_sum", "row_mass", "null_mass", "row_entropy", "row_max"):
            torch.testing.assert_close(getattr(fused, field), getattr(blocked, field), atol=1e-5, rtol=1e-5)


def test_obstacles():
    inputs = call(logit=0.3)

    def reason(operation=NOTHING, **changes):
        return path_flash.obstacle(operation, dataclasses.replace(inputs, **changes))

    assert reason() is None
    assert reason(visible=torch.ones(9, 9, dtype=torch.bool), causal=False) is None
    assert reason(Sigmoid()) == "its weights are not a softmax"
    assert reason(softcap=30.0) == "the model caps its scores"
    assert reason(dropout=0.1) == "attention dropout is on"
    assert reason(values=inputs.values[..., :4]) == (
        "the kernel needs values as wide as keys, and they have 4 and 8 coordinates"
    )
    assert "differ in dtype" in reason(values=inputs.values.float())
    elsewhere = {name: getattr(inputs, name).to("meta") for name in ("queries", "keys", "values")}
    assert "device 'meta'" in reason(**elsewhere)
    with pytest.raises(
        ConfigurationError, match=re.escape("path 'flash' cannot serve operation 'nothing': the model caps its scores")
    ):
        compute(NOTHING, dataclasses.replace(inputs, softcap=30.0), "flash")


def test_what_is_worth_it(monkeypatch):
    monkeypatch.setattr(path_flash, "_HAS_AMX", False)
    shapes = {"short": (1, 8, 64, 64), "long": (1, 8, 600, 64), "token": (1, 8, 1, 64)}

    def worth(shape, dtype, trains, amx=False):
        monkeypatch.setattr(path_flash, "_HAS_AMX", amx)
        queries = torch.empty(shapes[shape], dtype=dtype).requires_grad_(trains)
        keys = torch.empty(shapes["long" if shape == "token" else shape], dtype=dtype)
        return path_flash.worthwhile(
            NOTHING, Inputs(queries=queries, keys=keys, values=keys, visible=None, causal=True, scaling=1.0)
        )

    assert all(worth(shape, torch.float32, trains) for shape in shapes for trains in (False, True))
    assert all(worth(shape, torch.bfloat16, True, amx=True) for shape in shapes)
    assert not any(worth(shape, torch.bfloat16, True) for shape in shapes)
    assert [shape for shape in shapes if worth(shape, torch.bfloat16, False)] == ["long"]


def test_auto_takes_it():
    inputs = call(dtype=torch.float32, logit=0.3)
    assert choose(NOTHING, inputs) == "flash"
    torch.testing.assert_close(compute(NOTHING, inputs)[0], plain(NOTHING, inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("by_cudnn", [False, True], ids=["flash", "cudnn"])
def test_arguments_of_the_cuda_kernels(by_cudnn):
    """Shapes only, by the kernels' own shape functions: this much of the CUDA path can be told without a GPU."""
    with FakeTensorMode(), torch.no_grad():
        queries = torch.empty(2, 4, 300, 64, dtype=torch.bfloat16, device="cuda")
        keys = torch.empty(2, 2, 300, 64, dtype=torch.bfloat16, device="cuda")
        outputs, log_sum, *rest = path_flash._kernel(queries, keys, keys, None, True, 0.1, by_cudnn)
        gradients = path_flash._kernel_gradients(
            queries, queries, keys, keys, outputs, log_sum, None, True, 0.1, by_cudnn, *rest
        )
    assert (outputs.shape, log_sum.shape) == (queries.shape, queries.shape[:3])
    assert [gradient.shape for gradient in gradients] == [queries.shape, keys.shape, keys.shape]


@pytest.mark.parametrize(
    ("numbers", "agrees"),
    [
        ([1.0, 2.0], True),
        ([1.0, 2.01], True),
        ([1.0, 2.5], False),
        ([1.0, float("nan")], False),
        (RuntimeError("no plan"), False),
    ],
    ids=str,
)
def test_cudnn_is_believed_where_its_numbers_are_those_of_flash(monkeypatch, numbers, agrees):
    def trial(*tensors, by_cudnn):
        if by_cudnn and isinstance(numbers, Exception):
            raise numbers
        return [torch.tensor([number]) for number in (numbers if by_cudnn else [1.0, 2.0])]

    monkeypatch.setattr(path_flash, "_trial", trial)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    agreed = functools.partial(inspect.unwrap(path_flash._cudnn_agrees), torch.device("cpu"), torch.bfloat16, 64)
    assert agreed() is agrees
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not agreed()


def test_cudnn_is_left_out_where_torch_is_told_to(monkeypatch):
    monkeypatch.setattr(path_flash, "_cudnn_agrees", lambda *call: True)
    usable = functools.partial(path_flash._cudnn_usable, torch.device("cpu"), torch.bfloat16, 64)
    assert usable()
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not usable()
    monkeypatch.undo()
    monkeypatch.setattr(path_flash, "_cudnn_agrees", lambda *call: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not usable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device")
def test_cudnn_is_used_from_hopper_on():
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (64, 96, 128):
            assert path_flash._cudnn_usable(torch.device("cuda", 0), dtype, head_dim) is hopper, (dtype, head_dim)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device")
@pytest.mark.parametrize("cudnn", [False, True], ids=["flash", "cudnn"])
@pytest.mark.parametrize("settings", [{}, {"logit": 0.3}, {"key": (4, 64), "value": (4, 64)}], ids=str)
def test_cuda(monkeypatch, settings, cudnn):
    if not cudnn:
        monkeypatch.setattr(path_flash, "_by_cudnn", lambda queries: False)
    inputs = call(dtype=torch.bfloat16, q_len=300, kv_len=300, dim=64, device="cuda", **settings)
    assert path_flash.obstacle(NOTHING, inputs) is None
    assert max(errors(inputs)) <= 12 * 2.0**-9  # as on the CPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device")
def test_obstacles_on_cuda():
    half = call(dtype=torch.bfloat16, device="cuda")
    assert path_flash.obstacle(NOTHING, half) is None
    reasons = {
        "multiple of 8": call(dtype=torch.bfloat16, dim=12, device="cuda"),
        "bfloat16 and float16": call(dtype=torch.float32, device="cuda"),
        "no mask": call(dtype=torch.bfloat16, visible=HOLES.cuda(), device="cuda"),
        "last key": call(dtype=torch.bfloat16, q_len=4, device="cuda"),
    }
    for words, inputs in reasons.items():
        assert words in (path_flash.obstacle(NOTHING, inputs) or "")
