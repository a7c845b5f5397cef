"""What normalises the residual stream: RMSNorm, LayerNorm or a tanh without statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["NORMS", "DynamicTanh", "LayerNorm", "Norm", "RMSNorm"]


class Norm(nn.Module):
    """A norm over the last axis with a learned ``weight``; what comes out has the dtype of the weight.

    Args:
        size: size of the last axis.
        eps: added before the root, where there is one.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        """Initial values; called for parameters that are not read from a checkpoint."""
        nn.init.ones_(self.weight)


class RMSNorm(Norm):
    """``x / sqrt(mean(x²) + eps) · weight``; statistics in float32. Zhang & Sennrich 2019 (arXiv 1910.07467)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        # torch computes in float32 inside, without a float32 copy; of mixed dtypes it would make a slow composition.
        return nn.functional.rms_norm(hidden_states.to(self.weight.dtype), (self.size,), self.weight, self.eps)


class LayerNorm(Norm):
    """``(x - mean(x)) / sqrt(var(x) + eps) · weight + bias``; statistics in float32. Ba et al. 2016 (arXiv 1607.06450)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.layer_norm(hidden_states.to(self.weight.dtype), (self.size,), self.weight, self.bias, self.eps)


class DynamicTanh(Norm):
    """``tanh(alpha · x) · weight + bias`` with one learned ``alpha``, 0.5 at the start. Zhu et al. 2025 (arXiv 2503.10622).

    Nothing is normalised: each number is squashed alone, so a massive activation does not shrink the others. ``eps`` is unused.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.bias = nn.Parameter(torch.zeros(size))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.alpha, 0.5)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.tanh(self.alpha * hidden_states.to(self.weight.dtype)) * self.weight + self.bias


NORMS: dict[str, type[Norm]] = {"rms_norm": RMSNorm, "layer_norm": LayerNorm, "dynamic_tanh": DynamicTanh}
"""The values of ``Architecture.norm``."""
