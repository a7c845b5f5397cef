"""Feature kernels: weights that are products of mapped queries and keys, so that keys can be summed up before queries come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.operation import Operation

__all__ = ["FeatureKernel"]


@dataclass(frozen=True, kw_only=True)
class FeatureKernel(Operation):
    """``weights = φ(queries) · φ(keys) · scaling`` over visible keys, as they are or divided by what their row sums to.

    Gu et al. 2024 (arXiv 2410.10781), general form of attention; ``φ`` acts after rotary embedding. Weights are linear in the
    scores, on which :mod:`sinklab.attention.paths.linear` builds. A subclass overrides :meth:`features` alone.

    Args:
        normalize: divide each row by its sum; by ``max(|sum|, 1)`` where scores may be negative, since their sum may be 0.
    """

    normalize: bool = False

    @property
    def normalized(self) -> bool:  # type: ignore[override]
        """Whether rows sum to one: non-negative scores divided by their sum."""
        return self.normalize and not self.signed

    def divisor(self, row_sums: Tensor) -> Tensor:
        """What ``normalize`` divides a row by, given the sum of its scores; never 0."""
        # Non-negative scores sum to 0 only where no key is visible, and nothing is there to be divided.
        return row_sums.abs().clamp(min=1.0) if self.signed else row_sums + (row_sums == 0)

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores if visible is None else scores.masked_fill(~visible, 0.0)
        return weights / self.divisor(weights.sum(dim=-1, keepdim=True)) if self.normalize else weights
