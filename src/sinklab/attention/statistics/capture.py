"""The log-sum-exp that the model's own attention kernel computes and nobody keeps, caught on its way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LogSumExpCapture", "capture_log_sum_exp"]

_KERNELS = frozenset(
    f"aten::_scaled_dot_product_{name}"
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
"""Kernels that return ``(output, log_sum_exp, …)``, the log-sum-exp in natural units."""

_COMPOSITE = "aten::scaled_dot_product_attention"


class LogSumExpCapture(TorchDispatchMode):
    """Looks at the operators that run inside the context and passes every one of them on unchanged."""

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
        args: tuple[Tensor, ...] = (),
        kwargs: dict[str, Tensor] | None = None,
    ) -> object:
        if func._schema.name == _COMPOSITE:
            # In inference mode the public function arrives whole. Taking it apart is what would happen to it next; with the
            # mode switched on again, its kernel passes by here.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _KERNELS:
            query = args[0] if args else (kwargs or {})["query"]
            self._caught.append(_log_sum_exp(func, args, kwargs or {}, result[1], query.shape[2]))
        return result


def _log_sum_exp(
    func: torch._ops.OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    returned: Tensor | None,
    q_len: int,
) -> Tensor:
    """What a kernel returned, in one layout; empty where it computed none."""
    # The memory-efficient kernel and cuDNN are told whether to: without gradients the first returns an empty tensor, the second
    # none at all (an undefined tensor, which is ``None`` in Python).
    names = [argument.name for argument in func._schema.arguments]
    if "compute_log_sumexp" in names:
        index = names.index("compute_log_sumexp")
        wanted = args[index] if index < len(args) else kwargs.get("compute_log_sumexp")
        if not wanted:
            return torch.empty(0)
    if returned is None or not returned.numel():
        return torch.empty(0)
    log_sum_exp = returned.detach()
    if log_sum_exp.ndim == 4:  # cuDNN appends a dimension of one
        log_sum_exp = log_sum_exp.squeeze(-1)
    # The memory-efficient kernel pads the queries to a multiple of 32.
    return log_sum_exp[:, :, :q_len].float()


def capture_log_sum_exp() -> LogSumExpCapture:
    """``with capture_log_sum_exp() as captured: …`` keeps the row log-sum-exp of the one attention kernel that runs inside.

    Nothing about the computation changes: the mode calls each operator with the arguments it was given and hands back what it
    returned, so outputs are bit-identical. Read ``captured.log_sum_exp`` afterwards.
    """
    return LogSumExpCapture()
