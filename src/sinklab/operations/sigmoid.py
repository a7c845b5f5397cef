"""Sigmoid attention: each weight is decided alone, so no mass has to go anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sinklab.attention.operation import Operation, State
from sinklab.attention.paths.row_kernel import LOG2E, RowKernel, Rows, visible_count
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("sigmoid")
@dataclass(frozen=True, kw_only=True)
class Sigmoid(Operation):
    """``outputs = scale · weights · values``, ``weights = sigmoid(scores + bias)`` where visible, else 0.

    Weights are in (0, 1), and rows sum to one only with ``normalize``; ``scale`` is reported as the gain, not in the weights.

    Gu et al. 2024 (arXiv 2410.10781) use no bias, and find that the sink goes without normalisation and stays with it.
    Ramapuram et al. 2024 (arXiv 2409.04431) add ``-log(n)`` for a sequence of n tokens, so that the mass of a row starts near
    one. No null mass is defined: rows of independent weights have no sum that something could be missing from.

    Args:
        bias: number added to every score; any finite number, in units of the score.
        length_bias: also add ``-log(n)`` with n the number of keys that the query sees, which blocks, caches and padding leave
            alone; for the constant of a fixed context set ``bias`` to ``-log(context)`` instead.
        normalize: divide each row by its sum.
        scale: positive constant on the head outputs, without unit. It is the same function as an output map that starts at
            ``scale`` times its size, with another learning rate of that map. Without a bias every key starts with a half, so
            ``2/context`` starts rows of a full context with a mass of one.
    """

    bias: float = 0.0
    length_bias: bool = False
    normalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.bias), f"bias is {self.bias}; expected a finite number")
        self.require(math.isfinite(self.scale) and self.scale > 0, f"scale = {self.scale} must be a positive number")

    @property
    def normalized(self) -> bool:  # type: ignore[override]
        """Whether weights and null mass sum to one in every row, which the settings decide."""
        return self.normalize

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = (scores.float() if scores.dtype != torch.float64 else scores) + self.bias
        if self.length_bias:
            scores = scores - visible_count(scores, visible).log()
        if self.normalize:
            # A quotient of sigmoids is a softmax of their logarithms, which does not underflow where all scores are low.
            return Softmax().weights(functional.logsigmoid(scores), visible)
        weights = torch.sigmoid(scores)
        return weights if visible is None else weights.masked_fill(~visible, 0.0)

    def gain(self, state: State) -> Tensor | None:
        # Without dimensions, a tensor of the CPU multiplies one of any device, and nothing is copied.
        return None if self.scale == 1.0 else torch.tensor(self.scale, dtype=torch.float64, device="cpu")

    def log_similarity(self, scores: Tensor, counts: Tensor) -> Tensor:
        scores = scores + self.bias
        return functional.logsigmoid(scores - counts.log() if self.length_bias else scores)

    def row_kernel(self) -> RowKernel:
        return (_NormalizedKernel if self.normalize else _Kernel)(self)


class _Kernel(RowKernel):
    def __init__(self, operation: Sigmoid) -> None:
        self.bias, self.length_bias = operation.bias, operation.length_bias

    def shift_scores(self, scores: Tensor, rows: Rows) -> None:
        if self.length_bias:
            scores.add_((self.bias - rows.counts.clamp(min=1).log()) * self.unit)
        elif self.bias:
            scores.add_(self.bias * self.unit)

    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        self.shift_scores(scores, rows)
        return scores.sigmoid_()

    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        torch.ops.aten.sigmoid_backward(gradient, scores, grad_input=gradient)


class _NormalizedKernel(_Kernel):
    """``sigmoid(s) / exp(m) = 1 / (exp(m) + exp(m - s))``, with m the largest score or 0: the sum does not underflow."""

    unit: ClassVar[float] = LOG2E
    needs_term = True

    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        self.shift_scores(scores, rows)
        top = scores.amax(dim=1, keepdim=True).clamp_(max=0.0)
        rows.kept = torch.exp2(top)
        scores.neg_().add_(top).exp2_().add_(rows.kept).reciprocal_()
        rows.divide_by(scores.sum(dim=1, keepdim=True))
        return scores

    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        gradient.sub_(rows.term).mul_(scores)
        gradient.mul_(scores.mul_(-rows.kept).add_(1.0))  # 1 - sigmoid(s)
