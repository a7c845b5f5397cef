"""ReLU attention: positive scores are weights, the others are exactly 0, and a head can be silent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.attention.paths.row_kernel import RowKernel, Rows, visible_count
from sinklab.registry import operations


@operations.register("relu")
@dataclass(frozen=True, kw_only=True)
class Relu(Operation):
    """``weights = max(scores, 0) / max(n - uncounted, 1) ** power`` where visible, else 0; from 0, not bounded.

    n is the number of keys that the query sees, i for the i-th query of a causal sequence. Guo et al. 2024 (arXiv 2410.13835)
    divide by i, Ran-Milo 2026 (arXiv 2603.11487) by ``max(i - 1, 1)``, which leaves the BOS token uncounted; Wortsman et al.
    2023 (arXiv 2309.08586) try powers. These are fixed factors, no normalisation, and no null mass is defined.

    Args:
        normalize: divide each row by its sum instead. A row without a positive score is 0, and its null mass is 1.
        uncounted: keys that are not counted in n; an integer from 0.
        power: exponent of the divisor; 0 leaves the rectified scores as they are.
    """

    normalize: bool = False
    uncounted: int = 0
    power: float = 1.0

    def __post_init__(self) -> None:
        self.require(
            self.uncounted >= 0 and math.isfinite(self.power),
            f"uncounted is {self.uncounted} and power is {self.power}; expected an integer from 0 and a finite number",
        )
        changed = bool(self.uncounted) or self.power != 1.0
        self.require(
            not (self.normalize and changed),
            "normalize divides by the sum, so uncounted and power, which change the divisor, have no effect: leave them out",
        )
        self.require(not self.uncounted or self.power != 0, "uncounted has no effect when power is 0; leave it out")

    @property
    def normalized(self) -> bool:  # type: ignore[override]
        """Whether weights and null mass sum to one in every row, which the settings decide."""
        return self.normalize

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        weights = torch.relu(scores if scores.dtype == torch.float64 else scores.float())
        if visible is not None:
            weights = weights.masked_fill(~visible, 0.0)
        if self.normalize:
            total = weights.sum(dim=-1, keepdim=True)
            return weights / total.masked_fill(total == 0, 1.0)
        return weights / self.divisor(visible_count(scores, visible).to(weights.dtype))

    def null_mass(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor | None:
        """1 for a row without a positive score, 0 for any other; ``None`` unless normalised."""
        if not self.normalize:
            return None
        positive = scores > 0 if visible is None else (scores > 0) & visible
        return (~positive.any(dim=-1)).to(torch.promote_types(scores.dtype, torch.float32))

    def divisor(self, count: Tensor) -> Tensor:
        """What rectified scores are divided by, from the number of visible keys."""
        return (count - self.uncounted).clamp(min=1.0) ** self.power

    def log_similarity(self, scores: Tensor, counts: Tensor) -> Tensor:
        logarithms = torch.log(scores.clamp(min=torch.finfo(scores.dtype).tiny))
        if not self.normalize:
            logarithms = logarithms - self.divisor(counts).log()
        return torch.where(scores > 0, logarithms, float("-inf"))

    def row_kernel(self) -> RowKernel:
        return _Kernel(self)


class _Kernel(RowKernel):
    def __init__(self, operation: Relu) -> None:
        self.operation, self.needs_term = operation, operation.normalize

    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        scores.relu_()
        rows.divide_by(scores.sum(dim=1, keepdim=True) if self.operation.normalize else self.operation.divisor(rows.counts))
        return scores

    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        if self.needs_term:
            gradient.sub_(rows.term)
        torch.ops.aten.threshold_backward(gradient, scores, 0.0, grad_input=gradient)
