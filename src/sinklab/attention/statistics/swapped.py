"""Column statistics from a stock flash kernel with queries and keys exchanged: no kernel of our own, any device that has one.

The log-sum-exp that a flash kernel returns for (keys as queries, queries as keys) is the logarithm of the column sums, once
every score carries −LSE of its row. That offset rides along as extra feature columns; bfloat16 takes it in three pieces that
add up to float32. Reversing both sides in time turns "queries at or after the key" into the causal mask the kernel knows.
One-hot buckets as values make the same call return the exact map of query buckets × keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.statistics.blocked import agrees
from sinklab.attention.statistics.tiles import bucket_starts, visible_counts
from sinklab.attention.visibility import Causal, Everything

__all__ = ["Kernel", "stock_kernel", "swapped_is_exact", "swapped_obstacle", "swapped_statistics"]

Kernel = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""``(queries, keys, values, is_causal, scale)`` to outputs and natural log-sum-exp; value size equal to head size."""

_HIDDEN = -1e30
"""Offset of a query that is padding: its weights vanish, and being finite it does not produce NaN."""
_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative error of a column sum that :func:`swapped_is_exact` lets pass: rounding of the kernel's scores, ten times
what sound kernels show. A wrong mask, a wrong scale or another base of the logarithm is off by half or more."""


def stock_kernel(queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The flash kernel of the device: on a CPU aten's, on CUDA flash (bfloat16) or the memory-efficient one (float32)."""
    aten = torch.ops.aten
    if queries.device.type == "cpu":
        result = aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, is_causal, scale=scale)
    elif queries.dtype == torch.bfloat16:
        result = aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, is_causal, False, scale=scale)
    else:
        result = aten._scaled_dot_product_efficient_attention(queries, keys, values, None, True, 0.0, is_causal, scale=scale)
    return result[0], result[1]


def swapped_obstacle(call: AttentionCall, needs: frozenset[str]) -> str | None:
    """Why the exchanged call cannot serve a softmax call without soft-cap and bias, or ``None`` when it can."""
    if call.q_len != call.kv_len:
        return f"it needs as many queries as keys, got {call.q_len} and {call.kv_len}"
    causal = isinstance(call.visible, Causal) and call.visible.offset == 0
    if not causal and not isinstance(call.visible, Everything):
        return f"it serves causal or full visibility, got {type(call.visible).__name__}"
    if call.log_sum_exp is None:
        return "it needs the log-sum-exp of the forward call"
    if call.queries.dtype == torch.float16:
        return "the offsets would overflow float16"
    rows = sorted(needs & {"mass", "entropy", "maximum", "scores"})
    return f"it gives no {', '.join(rows)}" if rows else None


def swapped_statistics(
    call: AttentionCall, needs: frozenset[str], num_buckets: int, kernel: Kernel = stock_kernel
) -> Statistics:
    """Column sums and bucket map from ``kernel``; see :func:`sinklab.attention.statistics.columns.column_statistics`."""
    assert call.log_sum_exp is not None  # swapped_obstacle has seen to it
    normaliser = call.log_sum_exp.to(torch.promote_types(call.queries.dtype, torch.float32))
    if call.sink_scores is not None:
        normaliser = torch.logaddexp(normaliser, call.sink_scores.to(normaliser.dtype))
    padding = ~call.counted[:, None, :]
    # The kernel multiplies scores by the scale, so the offset is divided by it beforehand; scaling the queries instead would
    # round them when they are bfloat16.
    offset = (normaliser / -call.scaling).masked_fill(padding, _HIDDEN)
    pieces = _pieces(offset, call.queries.dtype)
    keys = call.keys.repeat_interleave(call.groups, dim=1)
    width = -(-(call.queries.shape[3] + len(pieces)) // 8) * 8
    as_keys = call.queries.new_zeros(*call.queries.shape[:3], width)
    as_queries = keys.new_zeros(*keys.shape[:3], width)
    size = call.queries.shape[3]
    as_keys[..., :size] = call.queries.masked_fill(padding[..., None], 0.0).flip(2)
    as_queries[..., :size] = keys.flip(2)
    for number, piece in enumerate(pieces):
        as_keys[..., size + number] = piece.flip(2)
        as_queries[..., size + number] = 1.0

    causal = isinstance(call.visible, Causal)
    starts = bucket_starts(call.q_len, num_buckets) if num_buckets else None
    maps = []
    for first in range(0, max(1, num_buckets), width):
        values = torch.zeros_like(as_keys)
        if starts is not None:
            for bucket in range(first, min(first + width, num_buckets)):
                values[:, :, starts[bucket] : starts[bucket + 1], bucket - first] = 1.0
        outputs, log_sums = kernel(as_queries, as_keys, values.flip(2), causal, call.scaling)
        sums = torch.exp(log_sums[:, :, : call.kv_len].to(normaliser.dtype)).flip(2)
        # A column that only padding sees is a mean over nothing inside the kernel; its sum is exactly 0.
        maps.append((outputs.to(normaliser.dtype).flip(2) * sums[..., None]).transpose(2, 3)[:, :, : num_buckets - first])

    statistics = Statistics()
    if "columns" in needs:
        statistics.column_sum = statistics.column_share = sums
        statistics.column_count = visible_counts(call)[0]
    if "log_sum_exp" in needs:
        statistics.log_sum_exp = call.log_sum_exp.masked_fill(padding, 0.0)
    if starts is not None:
        statistics.buckets, statistics.bucket_starts = torch.cat(maps, dim=2), starts
    return statistics


def _pieces(offset: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The offset as numbers of a narrower dtype that add up to it: three bfloat16 have the 24 bits of a float32."""
    if dtype != torch.bfloat16:
        return [offset]
    pieces = []
    for _ in range(3):
        pieces.append(offset.to(dtype))
        offset = offset - pieces[-1].to(offset.dtype)
    return pieces


@functools.cache
def swapped_is_exact(device: torch.device, dtype: torch.dtype, head_dim: int, kernel: Kernel = stock_kernel) -> bool:
    """Whether the exchanged call agrees with the blocked reference on a device, for a dtype and head size.

    Tried once per process; a kernel that refuses the shapes has not agreed.
    """
    if dtype not in _BOUNDS:
        return False
    return agrees(
        lambda call, buckets: swapped_statistics(call, frozenset({"columns"}), buckets, kernel),
        device,
        dtype,
        head_dim,
        _BOUNDS[dtype],
    )
