"""Column statistics of one attention call in linear memory: how much weight every key receives, and what every row looks like.

    column_sum_k = Σ_q exp(score_qk − LSE_q) = exp( LSE over q of (score_qk − LSE_q) )

The column sums of attention are the log-sum-exp of the transposed attention. Hence three ways to the same numbers:

    blocked   blocks of whole rows of the plain definition; any operation, soft-cap, bias; the reference
    fused     a second pass in small tiles, given the log-sum-exp of the rows; softmax; the fast way on a CPU
    triton    the same second pass in a kernel of our own; softmax, bands of visible keys; the fast way on a GPU

None of them holds a T × T tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import NEEDS
from sinklab.attention.statistics.blocked import blocked_statistics
from sinklab.attention.statistics.fused import LargeScoresError, fused_statistics
from sinklab.errors import ConfigurationError

_KERNELS = frozenset(
    f"aten::_scaled_dot_product_{name}"
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
"""Kernels that return ``(output, log_sum_exp, …)``, the log-sum-exp in natural units."""

_ON_REQUEST = 4
"""Place of ``compute_log_sumexp`` among the arguments of those kernels that return one only where a gradient is wanted."""

_COMPOSITE = "aten::scaled_dot_product_attention"


class LogSumExpCapture(TorchDispatchMode):
    """``with LogSumExpCapture() as captured: …`` keeps the row log-sum-exp of the one attention kernel that runs inside.

    Every operator is passed on and its result handed back, so outputs are bit-identical; some CUDA kernels write a log-sum-exp
    on request only, and are asked for it.
    """

    supports_higher_order_operators = True  # FlexAttention is one; without this torch refuses to run it under a mode

    def __init__(self) -> None:
        super().__init__()
        self._caught: list[Tensor] = []

    @property
    def log_sum_exp(self) -> Tensor | None:
        """Float32 ``(batch, num_heads, q_len)``; ``None`` unless exactly one attention kernel ran and returned one.

        It is a constant to autograd in every one of these kernels: never use it in a differentiable expression.
        """
        return self._caught[0] if len(self._caught) == 1 and self._caught[0].numel() else None

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func._schema.name == _COMPOSITE:
            # In inference mode the public function arrives whole. Taking it apart is what would happen to it next; with the
            # mode switched on again, its kernel passes by here.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func._schema.name not in _KERNELS:
            return func(*args, **(kwargs or {}))
        # Without a gradient torch asks cuDNN's kernel and the memory-efficient one for none, and a pass of our own over all
        # scores, which is what its absence costs, takes as long as the kernel.
        if len(args) > _ON_REQUEST and func._schema.arguments[_ON_REQUEST].name == "compute_log_sumexp":
            args = (*args[:_ON_REQUEST], True, *args[_ON_REQUEST + 1 :])
        result = func(*args, **(kwargs or {}))
        query, log_sum_exp = args[0] if args else (kwargs or {})["query"], result[1]
        if log_sum_exp is None or not log_sum_exp.numel():
            log_sum_exp = torch.empty(0)
        else:
            # cuDNN appends a dimension of one; the memory-efficient kernel pads the queries to a multiple of 32.
            log_sum_exp = log_sum_exp.detach()
            if log_sum_exp.ndim == 4:
                log_sum_exp = log_sum_exp.squeeze(-1)
            log_sum_exp = log_sum_exp[:, :, : query.shape[2]].float()
        self._caught.append(log_sum_exp)
        return result


Method = Literal["auto", "blocked", "fused", "triton"]

_SHORT = 512
"""On a GPU, up to this many keys the blocked way, which works on all samples and heads at once, is the faster one."""

FEW_PAIRS = 2**15
"""On a CPU, up to this many pairs of query and key in a head it is: 181 tokens, or one query and 32,768 keys."""


@torch.no_grad()
def column_statistics(
    call: AttentionCall, needs: frozenset[str] = frozenset({"columns"}), *, method: Method = "auto"
) -> Statistics:
    """Reduce a call to O(q_len + kv_len) numbers per head: float32, or float64 for a float64 call.

    Args:
        needs: which groups of fields to fill, keys of :data:`sinklab.attention.probe.NEEDS`; those that are no statistics of
            weights (``head_outputs``, ``hidden_states``, …) change nothing here. Other fields are ``None``.
        method: ``auto`` takes the fastest exact way that serves the call; any other name is used or refused, never replaced.
            Only under ``auto`` do scores beyond some thousands, which leave ``fused`` too few digits, go to ``blocked``.

    Raises:
        ConfigurationError: an unknown need or method, a log-sum-exp of the wrong shape, or a method that cannot serve the call.
        LargeScoresError: ``fused`` was asked for by name, and scores leave it too few digits.
    """
    unknown = sorted(needs - NEEDS.keys())
    if unknown:
        raise ConfigurationError(f"unknown needs: {', '.join(unknown)}; known: {', '.join(NEEDS)}")
    expected = call.queries.shape[:3]
    if call.log_sum_exp is not None and call.log_sum_exp.shape != expected:
        raise ConfigurationError(
            f"{call.site.module}: log_sum_exp has shape {tuple(call.log_sum_exp.shape)}, expected (batch, num_heads, q_len) = "
            f"{tuple(expected)}; leave it None when the kernel's layout differs"
        )
    free = method == "auto"
    if free:
        method = _choose(call)
    else:
        obstacle = _obstacle(call, method)
        if obstacle:
            raise ConfigurationError(
                f"{call.site.module}: method {method!r} cannot be used: {obstacle}; use 'auto' or 'blocked'"
            )
    # Under autocast the products would be rounded to bfloat16.
    with torch.autocast(call.queries.device.type, enabled=False):
        if method == "fused":
            try:
                return fused_statistics(call, needs)
            except LargeScoresError:
                if not free:
                    raise
                method = "blocked"
        if method == "triton":
            from sinklab.attention.statistics.on_gpu import gpu_statistics

            return gpu_statistics(call, needs)
        return blocked_statistics(call, needs)


def _choose(call: AttentionCall) -> Method:
    """The fastest way that serves the call."""
    device = call.queries.device.type
    if device == "cpu" and call.q_len * call.kv_len > FEW_PAIRS and _obstacle(call, "fused") is None:
        return "fused"
    if device == "cuda" and call.kv_len > _SHORT:
        from sinklab.attention.statistics.on_gpu import gpu_is_exact

        kind = call.queries.device, call.queries.dtype, call.queries.shape[3]
        if _obstacle(call, "triton") is None and gpu_is_exact(*kind):
            return "triton"
    return "blocked"


def _obstacle(call: AttentionCall, method: str) -> str | None:
    """Why a method cannot serve a call, or ``None`` when it can."""
    if method == "blocked":
        return None
    if method not in ("fused", "triton"):
        return "there is no such method (auto, blocked, fused, triton)"
    if not call.operation.is_softmax:
        return f"it needs the log-sum-exp of a softmax, and the operation is {call.operation.name!r}"
    if call.softcap is not None:
        return "the scores are soft-capped"
    if call.bias is not None:
        return "the scores carry a bias"
    if method != "triton":
        return None
    from sinklab.attention.statistics.on_gpu import gpu_obstacle

    return gpu_obstacle(call)
