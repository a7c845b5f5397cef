"""How column statistics are reached: which way serves a call, the captured log-sum-exp, and exact float32 products."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.attention.column_calls import make_call

from sinklab.attention.statistics import columns, on_gpu
from sinklab.attention.statistics.columns import LogSumExpCapture


@pytest.mark.parametrize(
    ("q_len", "kv_len", "way"), [(181, 181, "blocked"), (182, 181, "fused"), (1, 32768, "blocked"), (1, 32769, "fused")]
)
def test_on_the_cpu_the_size_decides(q_len, kv_len, way):
    assert columns._choose(make_call(batch=1, q_len=q_len, kv_len=kv_len)) == way


def test_what_is_no_plain_softmax_of_scores_is_taken_in_blocks():
    call = make_call(batch=1, q_len=200, kv_len=200)
    for changed in (
        dataclasses.replace(call, softcap=30.0),
        dataclasses.replace(call, bias=torch.zeros(1, 4, 200, 200)),
        make_call(batch=1, q_len=200, kv_len=200, operation={"name": "relu"}),
    ):
        assert columns._choose(changed) == "blocked"


@pytest.mark.parametrize(
    ("kv_len", "obstacle", "exact", "way"),
    [
        (512, None, True, "blocked"),
        (513, None, True, "triton"),
        (513, "a mask", True, "blocked"),
        (513, None, False, "blocked"),
    ],
)
def test_on_cuda_the_kernels_must_serve_and_be_exact(monkeypatch, kv_len, obstacle, exact, way):
    """Without a GPU: a call that says that it is on one, and what is found out about the kernels."""
    monkeypatch.setattr(columns, "_obstacle", lambda _call, _method: obstacle)
    monkeypatch.setattr(on_gpu, "gpu_is_exact", lambda *_: exact)
    queries = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, shape=(1, 4, 2, 8))
    assert columns._choose(types.SimpleNamespace(queries=queries, kv_len=kv_len)) == way


def _tensors(dtype: torch.dtype, kv_heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, 70, 16, generator=generator).to(dtype) for heads in (4, kv_heads, kv_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_output_is_bit_identical_and_the_value_is_right(mode: Callable, dtype: torch.dtype, masked: bool) -> None:
    queries, keys, values = _tensors(dtype)
    visible = torch.ones(70, 70, dtype=torch.bool).tril()
    options = {"attn_mask": visible} if masked else {"is_causal": True}
    with mode():
        plain = F.scaled_dot_product_attention(queries, keys, values, **options)
        with LogSumExpCapture() as captured:
            watched = F.scaled_dot_product_attention(queries, keys, values, **options)
    assert torch.equal(plain, watched)
    assert captured.log_sum_exp is not None
    scores = (queries.double() @ keys.double().mT * 16**-0.5).masked_fill(~visible, -torch.inf)
    # Scores below 6: float32 rounds them to 6 · 2**-23; bfloat16 inputs meet a kernel that rounds to 2**-8 inside.
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert captured.log_sum_exp.shape == (2, 4, 70)
    assert captured.log_sum_exp.dtype == torch.float32
    assert (captured.log_sum_exp - torch.logsumexp(scores, -1)).abs().max() < bound


def test_grouped_queries() -> None:
    queries, keys, values = _tensors(torch.float32, kv_heads=2)
    with LogSumExpCapture() as captured:
        F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
    scores = queries @ keys.repeat_interleave(2, 1).mT * 16**-0.5
    assert (captured.log_sum_exp - torch.logsumexp(scores, -1)).abs().max() < 1e-5


def test_gradients_are_those_of_the_model() -> None:
    gradients = []
    for watch in (False, True):
        queries, keys, values = (tensor.requires_grad_() for tensor in _tensors(torch.float32))
        if watch:
            with LogSumExpCapture() as captured:
                output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            assert not captured.log_sum_exp.requires_grad
        else:
            output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output.square().sum().backward()
        gradients.append((queries.grad, keys.grad, values.grad))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_none_without_exactly_one_kernel() -> None:
    queries, keys, values = _tensors(torch.float32)
    with LogSumExpCapture() as captured:
        torch.softmax(queries @ keys.mT, -1) @ values
    assert captured.log_sum_exp is None
    with LogSumExpCapture() as captured:
        F.scaled_dot_product_attention(queries, keys, values)
        assert captured.log_sum_exp is not None
        F.scaled_dot_product_attention(queries, keys, values)
    assert captured.log_sum_exp is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_math_fallback_gives_none_and_is_not_disturbed(mode: Callable) -> None:
    queries, keys, values = _tensors(torch.float32)
    with mode(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(queries, keys, values)
        with LogSumExpCapture() as captured:
            watched = F.scaled_dot_product_attention(queries, keys, values)
    assert torch.equal(plain, watched)
    assert captured.log_sum_exp is None


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_kernels_that_write_it_on_request_are_asked_for_it(name: str) -> None:
    """Without a gradient torch tells these kernels of CUDA to leave it out; shapes alone are worked out here."""
    kernel = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    with torch.no_grad():
        queries, keys, values = (tensor.to("meta") for tensor in _tensors(torch.bfloat16))
        with LogSumExpCapture() as captured:
            kernel(queries, keys, values, None, False, 0.0, True)
        assert captured.log_sum_exp is not None
        assert captured.log_sum_exp.shape == (2, 4, 70)


def test_a_kernel_that_returns_none() -> None:
    """An undefined tensor of C++ is None here."""

    def silent(*args: torch.Tensor) -> tuple[torch.Tensor, None]:
        return args[0], None

    silent._schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    with LogSumExpCapture() as captured:
        captured.__torch_dispatch__(silent, (), _tensors(torch.float32))
    assert captured.log_sum_exp is None
