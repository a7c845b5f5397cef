"""Scaled softmax: rows sum to alpha instead of one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.operation import State
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("scaled_softmax")
@dataclass(frozen=True, kw_only=True)
class ScaledSoftmax(Softmax):
    """``outputs = alpha · softmax(scores) · values``: attention whose rows sum to ``alpha``.

    Gu et al. 2024 (arXiv 2410.10781), in their own reading: a normaliser of 1/alpha times the row sum is softmax with the
    output map (or the value map) times alpha, and differs from it in initialisation and learning rate alone. So it is computed
    as softmax with the constant gain ``alpha``, and whatever serves softmax serves it: the weights are in [0, 1], their rows
    sum to one, there is no null mass, and ``alpha`` is reported as the gain.

    Args:
        alpha: sum of a row, positive. The paper has 2, 1 (softmax), 0.2, 0.1 and 0.05.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.alpha) and self.alpha > 0, f"alpha = {self.alpha} must be a positive number")

    def gain(self, state: State) -> Tensor:
        # Without dimensions, a tensor of the CPU multiplies one of any device, and nothing is copied.
        return torch.tensor(self.alpha, dtype=torch.float64, device="cpu")
