"""Softmax attention: every row of weights sums to one, so a head that must do nothing needs a sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.attention.paths.row_kernel import LOG2E, RowKernel, Rows
from sinklab.registry import operations


@operations.register("softmax")
@dataclass(frozen=True, kw_only=True)
class Softmax(Operation):
    """``weights = exp(scores) / sum over visible keys of exp(scores)``; in [0, 1], rows sum to one.

    Vaswani et al. 2017 (arXiv 1706.03762). Operations that give nothing a score of its own build on this class: the null score
    is one more term of the denominator, and its share is the null mass.
    """

    normalized: ClassVar[bool] = True
    is_softmax: ClassVar[bool] = True

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores.float() if scores.dtype != torch.float64 else scores
        if null_scores is not None:
            hidden = scores if visible is None else torch.where(visible, scores, float("-inf"))
            null = null_scores.to(scores.dtype)
            # The largest score of the row, the null term included, and a constant to the gradient. It is finite whatever is
            # hidden, but where the null score is -inf, too: such a row has no mass to give.
            top = torch.maximum(hidden.amax(dim=-1), null).detach()[..., None].clamp(min=torch.finfo(scores.dtype).min)
            exponentials = torch.exp(hidden - top)
            total = exponentials.sum(dim=-1, keepdim=True) + torch.exp(null[..., None] - top)
            return exponentials / total.masked_fill(total == 0.0, 1.0)
        if visible is None:
            return torch.softmax(scores, dim=-1)
        # On a CPU torch.where takes half the time of masked_fill.
        weights = torch.softmax(torch.where(visible, scores, torch.finfo(scores.dtype).min), dim=-1)
        # A row without a visible key would come out uniform; hidden weights are exactly zero by contract.
        return torch.where(visible, weights, 0.0)

    def row_kernel(self) -> RowKernel:
        return _Kernel()


class _Kernel(RowKernel):
    """Powers of two below the largest, divided by their sum at the end, when they have become head outputs."""

    unit: ClassVar[float] = LOG2E
    takes_null: ClassVar[bool] = True
    needs_term = True

    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        top = scores.amax(dim=1, keepdim=True)
        if rows.null_scores is None:
            rows.divide_by(scores.sub_(top).exp2_().sum(dim=1, keepdim=True))
            return scores
        null = rows.null_scores * LOG2E
        top = torch.maximum(top, null)
        nothing = torch.exp2(null - top)
        total = scores.sub_(top).exp2_().sum(dim=1, keepdim=True) + nothing
        rows.factor, rows.null_mass = total.reciprocal(), nothing / total
        return scores

    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        gradient.sub_(rows.term).mul_(scores)
