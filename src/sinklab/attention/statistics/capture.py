"""The log-sum-exp that the model's own attention kernel computes and nobody keeps, caught on its way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LogSumExpCapture", "capture_log_sum_exp"]

_KERNELS = frozenset(
    f"aten::_scaled_dot_product_{name}"
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
"""Kernels that return ``(output, log_sum_exp, …)``, the log-sum-exp in natural units."""

_ON_REQUEST = 4
"""Place of ``compute_log_sumexp`` among the arguments of those kernels that return one only where a gradient is wanted."""

_COMPOSITE = "aten::scaled_dot_product_attention"


class LogSumExpCapture(TorchDispatchMode):
    """Looks at the operators that run inside the context and passes every one of them on.

    All are called as they were but for kernels with an argument that decides whether they return a log-sum-exp: with this,
    they do.
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


def capture_log_sum_exp() -> LogSumExpCapture:
    """``with capture_log_sum_exp() as captured: …`` keeps the row log-sum-exp of the one attention kernel that runs inside.

    Nothing about the computation changes: the mode hands back what each operator returned, so outputs are bit-identical. Some
    CUDA kernels write a log-sum-exp on request only, and are asked for it. Read ``captured.log_sum_exp`` afterwards.
    """
    return LogSumExpCapture()
