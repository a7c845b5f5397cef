"""Sink logit: one learned score per head for attending to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.operation import HeadShape, State
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("sink_logit")
@dataclass(frozen=True, kw_only=True)
class SinkLogit(Softmax):
    """``weights = exp(scores) / (exp(s) + sum over visible keys of exp(scores))``; in [0, 1), rows sum to less than one.

    ``s`` is learned, one number for each query head, the same for every query (OpenAI 2025, gpt-oss, arXiv 2508.10925). It
    joins the denominator and carries no value; its share is the null mass, so weights and null mass sum to one.

    The parameter is ``sink_logit``, ``(num_heads,)``.

    Args:
        initial: value of ``s`` at the start, finite, in units of the score. 0 starts as softmax plus one.
    """

    initial: float = 0.0

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.initial), f"initial = {self.initial} must be a finite score")

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        return {"sink_logit": torch.full((shape.num_heads,), float(self.initial))}

    def null_scores(self, queries: Tensor, scaling: float, state: State) -> Tensor:
        return state["sink_logit"][None, :, None]
