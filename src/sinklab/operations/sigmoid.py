"""Sigmoid attention: each weight is decided alone, so no mass has to go anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.registry import operations

__all__ = ["Sigmoid"]


@operations.register("sigmoid")
@dataclass(frozen=True, kw_only=True)
class Sigmoid(Operation):
    """``weights = sigmoid(scores + bias)`` where visible, else 0; in (0, 1), rows do not sum to one.

    Gu et al. 2024 (arXiv 2410.10781) use ``bias = 0``; Ramapuram et al. 2024 (arXiv 2409.04431) use ``-log(seq_len)`` so
    that the mass of a row starts near one.

    Args:
        bias: number added to every score; natural units of the score.
    """

    bias: float = 0.0
    normalized: ClassVar[bool] = False

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores.float() if scores.dtype != torch.float64 else scores
        weights = torch.sigmoid(scores + self.bias)
        return weights if visible is None else weights.masked_fill(~visible, 0.0)
