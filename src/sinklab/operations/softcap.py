"""Soft cap: softmax of scores bounded to a range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("softcap")
@dataclass(frozen=True, kw_only=True)
class Softcap(Operation):
    """``weights = softmax(cap · tanh(scores / cap))`` over visible keys; in (0, 1], rows sum to one and there is no null mass.

    Gemma 2 (arXiv 2408.00118), with a cap of 50. No weight in a row of n visible keys exceeds
    ``1 / (1 + (n - 1) exp(-2 cap))``. A position bias is capped with the scores; the soft cap of a host model acts before both.

    Args:
        cap: positive number, in units of the score.
    """

    cap: float = 50.0
    normalized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cap) and self.cap > 0):
            raise ConfigurationError(f"operation 'softcap': cap = {self.cap} must be a positive score")

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return Softmax().weights(self.cap * torch.tanh(scores / self.cap), visible)
