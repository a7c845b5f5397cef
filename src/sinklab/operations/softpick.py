"""Softpick attention: a softmax whose numerator is rectified, so that a row may give its mass to nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.attention.paths.row_kernel import LOG2E, RowKernel, Rows
from sinklab.registry import operations

_SAFE = 48.0
"""In units of powers of two: such powers, and sums of them, are far from overflow, and only larger ones are shifted. Without a
shift ``exp(s) - 1`` keeps all its digits for small scores."""
_SMALL = 0.2
"""Likewise: rows without a larger score take ``expm1``; in others, what ``exp2 - 1`` loses is lost in their sum."""


@operations.register("softpick")
@dataclass(frozen=True, kw_only=True)
class Softpick(Operation):
    """``weights = relu(exp(s) - 1) / sum over visible keys of |exp(s) - 1|``; in [0, 1], rows sum to at most one.

    Zuhri et al. 2025 (arXiv 2504.20966). Keys with a negative score get no weight, but they dilute the others, and get a
    gradient through the denominator. Their share of it is the null mass: with it every row sums to one. A row whose
    scores are all 0 is 0, and its null mass is 1. The authors add 1e-6 to the denominator, which is left out here.
    """

    normalized: ClassVar[bool] = True

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        excess, total = self._excess(scores, visible)
        return torch.relu(excess) / total

    def null_mass(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        """Share of the denominator that keys with a negative score have; 1 for a row whose scores are all 0."""
        excess, total = self._excess(scores, visible)
        return torch.where((excess == 0).all(dim=-1), 1.0, (torch.relu(-excess) / total).sum(dim=-1))

    @staticmethod
    def _excess(scores: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """``exp(s) - 1``, 0 where hidden, and the sum of its absolute values (1 if that is 0), both divided by one factor."""
        scores = scores.float() if scores.dtype != torch.float64 else scores
        scores = scores if visible is None else scores.masked_fill(~visible, 0.0)
        shift = (scores.amax(dim=-1, keepdim=True) - _SAFE / LOG2E).clamp(min=0.0).detach()
        excess = torch.expm1(scores - shift) - torch.expm1(-shift)
        total = excess.abs().sum(dim=-1, keepdim=True)
        return excess, total.masked_fill(total == 0, 1.0)

    def row_kernel(self) -> RowKernel:
        return _Kernel()


class _Kernel(RowKernel):
    unit: ClassVar[float] = LOG2E
    hidden: ClassVar[float] = 0.0
    needs_term = True

    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        top = scores.amax(dim=1, keepdim=True)
        reach = torch.maximum(top, -scores.amin(dim=1, keepdim=True))
        precise = None
        if float(reach.min()) < _SMALL:
            # 2**x - 1 is several times as fast as expm1, but a row of small scores would consist of its rounding errors.
            small = (reach < _SMALL)[:, 0].nonzero()[:, 0]
            precise = torch.expm1(scores[small] / LOG2E)
        if float(top.max()) > _SAFE:
            excess = (top - _SAFE).clamp_(min=0.0)
            rows.kept = torch.exp2(-excess)
            scores.sub_(excess).exp2_().sub_(rows.kept)
        else:
            scores.exp2_().sub_(1.0)
        if precise is not None:
            scores[small] = precise
        torch.clamp(scores, min=0.0, out=scratch)
        # The sum of absolute values, in two sums that are faster than one of absolute values.
        rows.divide_by(2.0 * scratch.sum(dim=1, keepdim=True) - scores.sum(dim=1, keepdim=True))
        return scratch

    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        torch.ops.aten.threshold_backward(gradient, scores, 0.0, grad_input=gradient)
        gradient.addcmul_(torch.sign(scores, out=scratch), rows.term, value=-1.0)
        if rows.kept is None:
            gradient.addcmul_(gradient, scores)
        else:
            gradient.mul_(scores.add_(rows.kept))
