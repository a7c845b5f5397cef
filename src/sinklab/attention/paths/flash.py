"""The flash path: softmax operations on the stock flash kernels, forward and backward, whatever nothing scores.

A null term leaves the softmax over real keys as it is and scales it. With ``L`` the log-sum-exp of a row, ``n`` its null score
and ``p = sigmoid(n − L)`` the null mass,

    outputs = (1 − p) · softmax(scores) · values + p · null_value

The kernels return ``L``, but as a constant to autograd: gradients through this expression come out wrong, without a word. The
backward kernel recomputes a weight as ``exp(score − L)`` and takes the row term of the softmax gradient from the outputs. When
it is handed ``logaddexp(L, n)`` and the outputs above it is exact; what is left is of size ``q_len · head_dim``:

    d n = p · <d outputs, null_value − outputs>,    d null_value = Σ p · d outputs

On a GPU from Hopper on cuDNN's kernel, which torch takes there by itself, is up to twice as fast as FlashAttention and has the
same interface; it is used where it has been seen to do the above.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sinklab.attention.operation import Inputs, Operation
from sinklab.errors import ConfigurationError

_HAS_AMX = torch.cpu._is_amx_tile_supported()
"""Without tile instructions the CPU kernel is no faster in bfloat16 than in float32, and plain matrix products are."""

_SHORT = 256
"""In bfloat16 on a CPU without AMX: up to this many keys, or _FEW queries, plain products beat the kernel without gradients."""
_FEW = 8

_CUDNN_FROM = 128
"""On CUDA: queries from which on cuDNN's kernel is tried. It plans for every shape, and a single token gains nothing by it."""
_CUDNN_WIDEST = 128
"""Coordinates of the widest head whose gradients all its versions have."""


def obstacle(operation: Operation, inputs: Inputs) -> str | None:
    """Why the kernels cannot serve the call, or ``None``."""
    if not operation.is_softmax:
        return "its weights are not a softmax"
    queries, keys, values = inputs.queries, inputs.keys, inputs.values
    device, head_dim = queries.device.type, queries.shape[3]
    if not queries.dtype == keys.dtype == values.dtype:
        return f"queries, keys and values differ in dtype ({queries.dtype}, {keys.dtype}, {values.dtype})"
    if values.shape[3] != head_dim:
        return f"the kernel needs values as wide as keys, and they have {values.shape[3]} and {head_dim} coordinates"
    if device == "cuda":
        if inputs.visible is not None:
            return "the CUDA kernel takes no mask besides the causal one"
        if type(operation).null_scores is Operation.null_scores:
            return inputs.plain_scores()  # torch chooses among its kernels, of which one serves any dtype and size
        if queries.dtype not in (torch.bfloat16, torch.float16):
            return f"the CUDA kernel takes bfloat16 and float16, not {queries.dtype}"
        if head_dim % 8 or head_dim > 256:
            return f"the CUDA kernel needs a head_dim that is a multiple of 8 and at most 256, and it is {head_dim}"
        if inputs.causal and inputs.q_len != inputs.kv_len:
            return f"the CUDA kernel aligns a causal mask with the last key: {inputs.q_len} queries, {inputs.kv_len} keys"
    elif device != "cpu":
        return f"no flash kernel that returns its log-sum-exp is known for device {device!r}"
    return inputs.plain_scores()


def worthwhile(operation: Operation, inputs: Inputs) -> bool:
    """Whether the kernel beats the plain path: always, but for bfloat16 on a CPU without AMX.

    There it loses every training step, to plain products on short rows and to blocks of rows on long ones, and every step of
    decoding.
    """
    if inputs.queries.device.type != "cpu" or inputs.queries.dtype not in (torch.bfloat16, torch.float16) or _HAS_AMX:
        return True
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (inputs.queries, inputs.keys, inputs.values))
    return not trains and inputs.kv_len > _SHORT and inputs.q_len > _FEW


def head_outputs(operation: Operation, inputs: Inputs) -> Tensor:
    """Head outputs ``(batch, num_heads, q_len, value_dim)``; memory ``O(q_len + kv_len)``, but for a given ``visible``."""
    queries, keys = operation.features(inputs.queries, inputs.keys, inputs.state)
    null_scores = operation.null_scores(queries, inputs.scaling, inputs.state)
    # Under autocast a feature map may have left the common dtype.
    queries, keys = queries.to(inputs.values.dtype), keys.to(inputs.values.dtype)
    if null_scores is None:
        outputs = F.scaled_dot_product_attention(
            queries, keys, inputs.values, attn_mask=inputs.visible, is_causal=inputs.causal, scale=inputs.scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )  # fmt: skip
        return operation.finish(outputs, None, inputs.state)
    exact = torch.promote_types(queries.dtype, torch.float32)
    null_value = operation.null_value(inputs.state)
    outputs = _NullSoftmax.apply(
        _dense(queries), _dense(keys), _dense(inputs.values), null_scores.to(exact).expand(queries.shape[:3]),
        null_value if null_value is None else null_value.to(exact).expand(queries.shape[1], -1), inputs.visible, inputs.causal,
        inputs.scaling, _by_cudnn(queries),
    )  # fmt: skip
    return operation.shift_and_gate(outputs, inputs.state)


class _NullSoftmax(torch.autograd.Function):
    """Softmax attention with null scores ``(batch, num_heads, q_len)`` and a null value ``(num_heads, value_dim)`` or none."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, null_scores: Tensor, null_value: Tensor | None,
        visible: Tensor | None, causal: bool, scaling: float, by_cudnn: bool,
    ) -> Tensor:  # fmt: skip
        mask = None if visible is None else _additive(visible, queries.dtype)
        outputs, log_sum, *rest = _kernel(queries, keys, values, mask, causal, scaling, by_cudnn)
        if visible is not None:
            # The kernel calls the log-sum-exp of a row without a visible key 0; it is minus infinity.
            log_sum = log_sum.masked_fill(~visible.any(dim=-1), float("-inf"))
        outputs.mul_(torch.sigmoid(log_sum - null_scores)[..., None])
        if null_value is not None:
            outputs.add_(torch.sigmoid(null_scores - log_sum)[..., None] * null_value[:, None])
        total = torch.logaddexp(log_sum, null_scores)
        ctx.save_for_backward(queries, keys, values, null_scores, null_value, mask, outputs, total, *rest)
        ctx.settings = causal, scaling, by_cudnn
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_NullSoftmaxGradients.apply(gradient, *ctx.settings, *ctx.saved_tensors), None, None, None, None


class _NullSoftmaxGradients(torch.autograd.Function):
    """Gradients of :class:`_NullSoftmax` with respect to its first five inputs, which have none themselves."""

    @staticmethod
    def forward(
        ctx: object, gradient: Tensor, causal: bool, scaling: float, by_cudnn: bool, queries: Tensor, keys: Tensor,
        values: Tensor, null_scores: Tensor, null_value: Tensor | None, mask: Tensor | None, outputs: Tensor, total: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        gradient = _dense(gradient)
        inner = _kernel_gradients(gradient, queries, keys, values, outputs, total, mask, causal, scaling, by_cudnn, *rest)
        nothing = torch.exp(null_scores - total)
        gradient = gradient.to(total.dtype)
        apart = outputs if null_value is None else outputs - null_value[:, None]
        score_gradient = -nothing * (gradient * apart).sum(dim=-1)
        value_gradient = None if null_value is None else (nothing[..., None] * gradient).sum(dim=(0, 2))
        return *inner, score_gradient, value_gradient

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        raise ConfigurationError(
            "attention path 'flash' has first derivatives only, and a second one was asked for (create_graph=True); use "
            "sinklab.attention.paths.table.set_attention_path(model, 'plain')"
        )


def _kernel(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scaling: float, by_cudnn: bool
) -> tuple[Tensor, ...]:
    """Outputs, log-sum-exp ``(batch, num_heads, q_len)`` in natural units, and what the kernel of the gradients wants back."""
    if queries.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, attn_mask=mask, scale=scaling
        )
    if by_cudnn:
        outputs, log_sum, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, keys, values, None, True, 0.0, causal, False, scale=scaling
        )
        return outputs, log_sum.squeeze(-1), seed, offset
    outputs, log_sum, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        queries, keys, values, 0.0, causal, False, scale=scaling
    )
    return outputs, log_sum, seed, offset


def _kernel_gradients(
    gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor, log_sum: Tensor, mask: Tensor | None,
    causal: bool, scaling: float, by_cudnn: bool, *rest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values from weights ``exp(score − log_sum)`` and the row term ``<gradient, outputs>``."""
    tensors = (gradient, queries, keys, values, outputs, log_sum)
    if queries.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, causal, attn_mask=mask, scale=scaling
        )
    # No packed sequences: no tables of where they start, and the longest one is all there is.
    packing = (None, None, queries.shape[2], keys.shape[2])
    if by_cudnn:
        of_rows = (*tensors[:-1], log_sum.unsqueeze(-1))
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *of_rows, *rest, None, *packing, 0.0, causal, scale=scaling
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*tensors, *packing, 0.0, causal, *rest, scale=scaling)


def _by_cudnn(queries: Tensor) -> bool:
    """Whether cuDNN's kernel takes a call that :func:`obstacle` lets pass."""
    return (
        queries.device.type == "cuda"
        and queries.shape[2] >= _CUDNN_FROM
        and queries.shape[3] <= _CUDNN_WIDEST
        and _cudnn_usable(queries.device, queries.dtype, queries.shape[3])
    )


@torch.compiler.assume_constant_result  # a compiler cannot look at torch's switches, nor try a kernel
def _cudnn_usable(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch may take cuDNN's kernel, as its switches say, and it does here what is asked of it."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return allowed and _cudnn_agrees(device, dtype, head_dim)


@torch.compiler.disable  # some versions of the compiler watch what the function above calls, too
@functools.cache
def _cudnn_agrees(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN's outputs, log-sum-exp and gradients with a null term are those of FlashAttention."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    with torch.no_grad(), _disable_current_modes():  # a session counts the kernels that run in it
        generator = torch.Generator().manual_seed(0)
        draw = [torch.randn(2, heads, 200, head_dim, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)]
        try:
            found, expected = (_trial(*draw, by_cudnn=by_cudnn) for by_cudnn in (True, False))
        except RuntimeError:  # no plan for such a call
            return False
        # A dozen roundings of half precision, as the tests of every path allow.
        return all(
            float((one.double() - two.double()).norm()) <= 12 * torch.finfo(dtype).eps * float(two.double().norm())
            for one, two in zip(found, expected, strict=True)
        )


def _trial(queries: Tensor, keys: Tensor, values: Tensor, gradient: Tensor, *, by_cudnn: bool) -> list[Tensor]:
    """Outputs, log-sum-exp and gradients of a causal call with a null score of 0."""
    scaling = queries.shape[3] ** -0.5
    outputs, log_sum, *rest = _kernel(queries, keys, values, None, True, scaling, by_cudnn)
    outputs = outputs * torch.sigmoid(log_sum)[..., None].to(outputs.dtype)
    total = torch.logaddexp(log_sum, torch.zeros_like(log_sum))
    gradients = _kernel_gradients(gradient, queries, keys, values, outputs, total, None, True, scaling, by_cudnn, *rest)
    return [outputs, log_sum, *gradients]


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous, as the kernels need it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask with four dimensions to be added to the scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))
    return mask[(None,) * (4 - mask.ndim)]
