"""Clipped softmax: a softmax stretched beyond [0, 1] and clipped, so that a weight can be exactly 0 at a finite score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.attention.paths.row_kernel import LOG2E, RowKernel, Rows, visible_count
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations

_GAMMA = -0.025


@operations.register("clipped_softmax")
@dataclass(frozen=True, kw_only=True)
class ClippedSoftmax(Operation):
    """``weights = clip((zeta - gamma) · softmax(scores) + gamma, 0, 1)``; in [0, 1], 0 where hidden.

    Bondarenko et al. 2023 (arXiv 2306.12929). Clipped weights get no gradient. The clipping comes after the mask, as in their
    release. With ``zeta = 1`` no row sums to more than one, and the remainder is the null mass; with a larger one rows
    can sum to more, so the operation then counts as not normalised and defines none.

    Args:
        gamma: lower end of the stretch, at most 0: weights below ``-gamma / (zeta - gamma)`` become 0. Give it or ``alpha``;
            with neither it is -0.025, published for BERT-base at length 128. Longer rows need a smaller one.
        alpha: ``gamma = -alpha / n``, at least 0; the paper's form for all lengths, tried with 2 to 4. Here n is the number of
            keys that the query sees, which blocks, caches and padding leave alone.
        zeta: upper end of the stretch, at least 1.
    """

    gamma: float | None = None
    alpha: float | None = None
    zeta: float = 1.0

    def __post_init__(self) -> None:
        alone = self.gamma is None or self.alpha is None
        self.require(alone, f"gamma is {self.gamma} and alpha, which stands for it, is {self.alpha}; give one")
        gamma, alpha = self.gamma or 0.0, self.alpha or 0.0
        self.require(
            -math.inf < gamma <= 0 <= alpha < math.inf and 1 <= self.zeta < math.inf,
            f"gamma is {self.gamma}, alpha is {self.alpha} and zeta is {self.zeta}; expected finite numbers, gamma at most 0, "
            "alpha at least 0 and zeta at least 1",
        )

    @property
    def normalized(self) -> bool:  # type: ignore[override]
        """Whether weights and null mass sum to one in every row, which the settings decide."""
        return self.zeta == 1.0

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        weights = Softmax().weights(scores, visible)
        gamma = self.stretch(visible_count(weights, visible))
        return torch.clamp((self.zeta - gamma) * weights + gamma, 0.0, 1.0)

    def null_mass(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor | None:
        """What clipping takes from the row; ``None`` if ``zeta`` is not 1."""
        return (1.0 - self.weights(scores, visible).sum(dim=-1)).clamp(min=0.0) if self.normalized else None

    def stretch(self, count: Tensor) -> Tensor:
        """Gamma of rows with ``count`` visible keys."""
        if self.alpha is not None:
            return -self.alpha / count
        return torch.full_like(count, _GAMMA if self.gamma is None else self.gamma)

    def row_kernel(self) -> RowKernel:
        return _Kernel(self)


class _Kernel(RowKernel):
    unit: ClassVar[float] = LOG2E

    def __init__(self, operation: ClippedSoftmax) -> None:
        self.operation = operation

    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        scores.sub_(scores.amax(dim=1, keepdim=True)).exp2_()
        scores.mul_(rows.divide_by(scores.sum(dim=1, keepdim=True)))
        # clip((zeta - gamma) · p + gamma, 0, 1)  =  width · clip(p + gamma / width, 0, 1 / width)  with width = zeta - gamma
        gamma = self.operation.stretch(rows.counts.clamp(min=1.0))
        rows.factor = width = self.operation.zeta - gamma
        torch.add(scores, gamma / width, out=scratch).relu_()
        rows.kept = largest = width.reciprocal()
        return torch.minimum(scratch, largest, out=scratch) if self.operation.zeta > 1 else scratch

    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        torch.ops.aten.threshold_backward(gradient, scratch, 0.0, grad_input=gradient)
        if self.operation.zeta > 1:
            gradient.masked_fill_(scratch >= rows.kept, 0.0)
        torch.ops.aten._softmax_backward_data(gradient, scores, -1, scores.dtype, grad_input=gradient)
