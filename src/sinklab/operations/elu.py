"""ELU attention: elu(score) + 1, an exponential for negative scores and a straight line for positive ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.attention.paths.row_kernel import LOG2E, RowKernel, Rows
from sinklab.operations._elu_plus_one import elu_plus_one
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("elu")
@dataclass(frozen=True, kw_only=True)
class Elu(Operation):
    """``weights = elu(scores) + 1`` where visible, else 0: ``exp(s)`` below 0 and ``s + 1`` above; positive, not bounded.

    Gu et al. 2024 (arXiv 2410.10781), who find no sink without normalisation; with it their training failed. This maps the
    *score*; the operation that maps queries and keys is ``elu_kernel``. No null mass is defined.

    Args:
        normalize: divide each row by its sum.
    """

    normalize: bool = False

    @property
    def normalized(self) -> bool:  # type: ignore[override]
        """Whether weights and null mass sum to one in every row, which the settings decide."""
        return self.normalize

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores.float() if scores.dtype != torch.float64 else scores
        if self.normalize:
            # A quotient of similarities is a softmax of their logarithms, which does not underflow where all scores are low.
            return Softmax().weights(self.log_similarity(scores), visible)
        weights = elu_plus_one(scores)
        return weights if visible is None else weights.masked_fill(~visible, 0.0)

    def log_similarity(self, scores: Tensor, counts: Tensor | None = None) -> Tensor:
        return torch.where(scores < 0, scores, torch.log1p(torch.where(scores < 0, 0.0, scores)))

    def row_kernel(self) -> RowKernel:
        return _Kernel(self.normalize)


class _Kernel(RowKernel):
    unit: ClassVar[float] = LOG2E

    def __init__(self, normalize: bool) -> None:
        self.needs_term = normalize

    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        torch.clamp(scores, min=0.0, out=scratch)
        scores.clamp_(max=0.0)
        if self.needs_term:
            # Where all scores are negative, the largest is taken out, so that the sum does not underflow.
            scores.sub_(scores.amax(dim=1, keepdim=True))
        scores.exp2_().add_(scratch, alpha=1 / LOG2E)
        if self.needs_term:
            rows.divide_by(scores.sum(dim=1, keepdim=True))
        return scores

    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        if self.needs_term:
            gradient.sub_(rows.term)
        gradient.mul_(scores.clamp_(max=1.0))  # the slope is the weight itself below 0, and 1 above
