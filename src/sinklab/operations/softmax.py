"""Softmax attention: every row of weights sums to one, so a head with nothing to say needs a sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.registry import operations

__all__ = ["Softmax"]


@operations.register("softmax")
@dataclass(frozen=True, kw_only=True)
class Softmax(Operation):
    """``weights = exp(scores) / sum over visible keys of exp(scores)``; in [0, 1], rows sum to one.

    Vaswani et al. 2017 (arXiv 1706.03762).
    """

    normalized: ClassVar[bool] = True

    def weights(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        scores = scores.float() if scores.dtype != torch.float64 else scores
        if visible is None:
            return torch.softmax(scores, dim=-1)
        weights = torch.softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min), dim=-1)
        # A row without a visible key would come out uniform; hidden weights are exactly zero by contract.
        return weights.masked_fill(~visible, 0.0)
