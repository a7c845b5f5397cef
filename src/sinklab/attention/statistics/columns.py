"""Column statistics of one attention call in linear memory: how much weight every key receives, and what every row looks like.

    column_sum_k = Σ_q exp(score_qk − LSE_q) = exp( LSE over q of (score_qk − LSE_q) )

The column sums of attention are the log-sum-exp of the transposed attention. Hence four ways to the same numbers:

    blocked   blocks of whole rows of the plain definition; any operation, soft-cap, bias; the reference
    fused     a second pass in small tiles, given the log-sum-exp of the rows; softmax; the fast way on a CPU
    triton    the same second pass in a kernel of our own; softmax, bands of visible keys; the fast way on a GPU
    swapped   a stock flash kernel with queries and keys exchanged; softmax, causal or full; for GPUs without Triton

None of them holds a T × T tensor.
"""

from __future__ import annotations

from typing import Literal

import torch

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import NEEDS
from sinklab.attention.statistics.blocked import blocked_statistics
from sinklab.attention.statistics.capture import capture_log_sum_exp
from sinklab.attention.statistics.fused import LargeScoresError, fused_statistics
from sinklab.attention.statistics.on_gpu import gpu_is_exact, gpu_obstacle, gpu_statistics
from sinklab.attention.statistics.swapped import swapped_is_exact, swapped_obstacle, swapped_statistics
from sinklab.errors import ConfigurationError

__all__ = ["Method", "capture_log_sum_exp", "column_statistics"]

Method = Literal["auto", "blocked", "fused", "triton", "swapped"]

_SHORT = 512
"""On a GPU, up to this many keys the blocked way, which works on all samples and heads at once, is the faster one."""

_FEW_PAIRS = 2**14
"""On a CPU, up to this many pairs of query and key in a head it is: 128 tokens, or one query and 16,384 keys."""


@torch.no_grad()
def column_statistics(
    call: AttentionCall,
    needs: frozenset[str] = frozenset({"columns"}),
    *,
    num_buckets: int = 0,
    method: Method = "auto",
) -> Statistics:
    """Reduce a call to O(q_len + kv_len) numbers per head.

    Args:
        call: the call; on any device, in any dtype. Statistics come in float32, in float64 for a float64 call.
        needs: which groups of fields to fill, keys of :data:`sinklab.attention.probe.NEEDS`. Names there that are not
            statistics of the weights (``head_outputs``, ``hidden_states``, …) are allowed and change nothing here.
        num_buckets: when positive, also the exact map of so many buckets of consecutive queries against every key.
        method: ``auto`` takes the fastest exact way that serves the call; any other name is used or refused, never replaced.
            Only under ``auto`` do scores beyond some thousands, which leave ``fused`` too few digits, go to ``blocked``.

    Returns:
        Statistics with the fields of ``needs`` filled; all others are ``None``.

    Raises:
        ConfigurationError: an unknown need or method, a negative number of buckets, a log-sum-exp of the wrong shape, or a
            method that cannot serve this call.
        LargeScoresError: ``fused`` was asked for by name, and scores leave it too few digits.
    """
    unknown = sorted(needs - NEEDS.keys())
    if unknown:
        raise ConfigurationError(f"unknown needs: {', '.join(unknown)}; known: {', '.join(NEEDS)}")
    if num_buckets < 0:
        raise ConfigurationError(f"num_buckets must be 0 (no map) or positive, got {num_buckets}")
    expected = call.queries.shape[:3]
    if call.log_sum_exp is not None and call.log_sum_exp.shape != expected:
        raise ConfigurationError(
            f"{call.site.module}: log_sum_exp has shape {tuple(call.log_sum_exp.shape)}, expected (batch, num_heads, q_len) = "
            f"{tuple(expected)}; leave it None when the kernel's layout differs"
        )
    free = method == "auto"
    if free:
        method = _choose(call, needs)
    else:
        obstacle = _obstacle(call, needs, method)
        if obstacle:
            raise ConfigurationError(
                f"{call.site.module}: method {method!r} cannot be used: {obstacle}; use 'auto' or 'blocked'"
            )
    # Under autocast the products would be rounded to bfloat16.
    with torch.autocast(call.queries.device.type, enabled=False):
        if method == "fused":
            try:
                return fused_statistics(call, needs, num_buckets)
            except LargeScoresError:
                if not free:
                    raise
                method = "blocked"
        if method == "triton":
            return gpu_statistics(call, needs, num_buckets)
        if method == "swapped":
            return swapped_statistics(call, needs, num_buckets)
        return blocked_statistics(call, needs, num_buckets)


def _choose(call: AttentionCall, needs: frozenset[str]) -> Method:
    """The fastest way that serves the call."""
    device = call.queries.device.type
    if device == "cpu" and call.q_len * call.kv_len > _FEW_PAIRS and _obstacle(call, needs, "fused") is None:
        return "fused"
    if device == "cuda" and call.kv_len > _SHORT:
        kind = call.queries.device, call.queries.dtype, call.queries.shape[3]
        if _obstacle(call, needs, "triton") is None and gpu_is_exact(*kind):
            return "triton"
        if _obstacle(call, needs, "swapped") is None and swapped_is_exact(*kind):
            return "swapped"
    return "blocked"


def _obstacle(call: AttentionCall, needs: frozenset[str], method: str) -> str | None:
    """Why a method cannot serve a call, or ``None`` when it can."""
    if method == "blocked":
        return None
    if method not in ("fused", "triton", "swapped"):
        return "there is no such method (auto, blocked, fused, triton, swapped)"
    if not call.operation.is_softmax:
        return f"it needs the log-sum-exp of a softmax, and the operation is {call.operation.name!r}"
    if call.softcap is not None:
        return "the scores are soft-capped"
    if call.bias is not None:
        return "the scores carry a bias"
    if method == "triton":
        return gpu_obstacle(call)
    return swapped_obstacle(call, needs) if method == "swapped" else None
