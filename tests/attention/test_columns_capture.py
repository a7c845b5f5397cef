"""The captured log-sum-exp: right, and the computation untouched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sinklab.attention.statistics.capture import _log_sum_exp
from sinklab.attention.statistics.columns import capture_log_sum_exp


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
        with capture_log_sum_exp() as captured:
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
    with capture_log_sum_exp() as captured:
        F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
    scores = queries @ keys.repeat_interleave(2, 1).mT * 16**-0.5
    assert (captured.log_sum_exp - torch.logsumexp(scores, -1)).abs().max() < 1e-5


def test_gradients_are_those_of_the_model() -> None:
    gradients = []
    for watch in (False, True):
        queries, keys, values = (tensor.requires_grad_() for tensor in _tensors(torch.float32))
        if watch:
            with capture_log_sum_exp() as captured:
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
    with capture_log_sum_exp() as captured:
        torch.softmax(queries @ keys.mT, -1) @ values
    assert captured.log_sum_exp is None
    with capture_log_sum_exp() as captured:
        F.scaled_dot_product_attention(queries, keys, values)
        assert captured.log_sum_exp is not None
        F.scaled_dot_product_attention(queries, keys, values)
    assert captured.log_sum_exp is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_math_fallback_gives_none_and_is_not_disturbed(mode: Callable) -> None:
    queries, keys, values = _tensors(torch.float32)
    with mode(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(queries, keys, values)
        with capture_log_sum_exp() as captured:
            watched = F.scaled_dot_product_attention(queries, keys, values)
    assert torch.equal(plain, watched)
    assert captured.log_sum_exp is None


@pytest.mark.parametrize("kernel", ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"])
def test_a_cuda_kernel_that_was_told_to_compute_none(kernel: str) -> None:
    """Without a GPU: what it hands back then is an undefined tensor, an empty one, or memory that nobody wrote."""
    func, queries = getattr(torch.ops.aten, kernel).default, torch.empty(2, 4, 70, 64)
    padded = torch.randn(2, 4, 96) if "efficient" in kernel else torch.randn(2, 4, 70, 1)
    for returned in (None, torch.empty(0), padded):
        assert not _log_sum_exp(func, (queries, queries, queries, None, False), {}, returned, 70).numel()
    found = _log_sum_exp(func, (queries, queries, queries, None), {"compute_log_sumexp": True}, padded, 70)
    assert torch.equal(found, padded[:, :, :70].reshape(2, 4, 70))
