"""p-normalised attention: similarities divided by the p-norm of their row instead of its sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from sinklab.attention.operation import Operation
from sinklab.registry import operations


@operations.register("p_normalized")
@dataclass(frozen=True, kw_only=True)
class PNormalized(Operation):
    """``weights = sim / (sum over visible keys of sim^p)^(1/p)`` with ``sim = exp(scores)`` or ``sigmoid(scores)``; in [0, 1].

    Gu et al. 2024 (arXiv 2410.10781). The weights to the power of p sum to one: rows sum to less than one for p < 1 and to more
    for p > 1, up to ``n^(1 - 1/p)`` for n visible keys. No null mass is defined. For ``exp`` the weights are the p-th root of
    the softmax at temperature 1/p.

    Args:
        p: positive, not 1, which is softmax or normalised sigmoid attention. In the paper ``exp`` trains with 1/2, 1/3 and 1/4
            and diverges with 2, 3 and 4; ``sigmoid`` trains with 1 to 4.
        sigmoid: take ``sigmoid`` as the similarity instead of ``exp``.
    """

    p: float = 0.5
    sigmoid: bool = False
    normalized: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.p) and self.p > 0, f"p = {self.p} must be a positive number")
        same = "sigmoid with its rows normalised" if self.sigmoid else "softmax"
        self.require(self.p != 1, f"p = 1 divides by the sum of the row, which is operation {same}; use that")

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores if scores.dtype == torch.float64 else scores.float()
        # log(sim / norm) = log_softmax(p · log sim) / p: at most 0 whatever the scores are, so nothing overflows or underflows.
        powers = self.p * (logsigmoid(scores) if self.sigmoid else scores)
        if visible is None:
            return torch.exp(log_softmax(powers, dim=-1) / self.p)
        weights = torch.exp(log_softmax(powers.masked_fill(~visible, torch.finfo(scores.dtype).min), dim=-1) / self.p)
        # A row without a visible key would come out uniform; hidden weights are exactly zero by contract.
        return weights.masked_fill(~visible, 0.0)
