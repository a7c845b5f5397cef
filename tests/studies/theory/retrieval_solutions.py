"""Weights of one head that solve key-query retrieval: undivided ReLU exactly, without a sink, softmax with one."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from sinklab.studies.theory.retrieval_task import BOS, CONTENT, FIRST_KEY, TRIGGER, RetrievalTarget


@dataclasses.dataclass(frozen=True)
class RetrievalHead:
    """One head without positions, scaling or residual.

    Attributes:
        score: ``S``, float64 ``(width, width)``: a query ``x`` scores a key ``x'`` by ``xᵀ S x'``. As maps of a layer:
            ``W_Q = Sᵀ``, ``W_K = 1``.
        value: ``M``, float64 ``(width, width)``: the output is ``Σ_k A_k M x_k``.
        attention: ``"softmax"``, or ``"relu"``: ReLU of the scores, not divided by anything.
    """

    score: Tensor
    value: Tensor
    attention: Literal["softmax", "relu"]

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``(batch, length, width)`` and causal weights ``(batch, length, length)``, float64."""
        states = inputs.to(self.score.dtype)
        scores = states @ self.score @ states.mT
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=inputs.device).triu(1)
        if self.attention == "softmax":
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        else:
            weights = scores.relu().masked_fill(hidden, 0.0)
        return weights @ states @ self.value.mT, weights


def relu_solution(keys: int, values: int, target: RetrievalTarget = "value") -> RetrievalHead:
    """Undivided ReLU attention that solves the task with no error at all, and no weight on BOS or off the trigger.

    The score is 1 where keys agree, less 1 where both tokens are content or both are the trigger: 1 for the trigger on the
    token that it asks for, 0 or less for all else. A content token behind the trigger never has the key that was asked for.
    """
    width = FIRST_KEY + keys + values
    score = torch.zeros(width, width, dtype=torch.float64)
    key = torch.arange(FIRST_KEY, FIRST_KEY + keys)
    score[key, key] = 1
    score[CONTENT, CONTENT] = score[TRIGGER, TRIGGER] = -1
    return RetrievalHead(score, _value_map(keys, values, target), "relu")


def softmax_solution(keys: int, values: int, length: int, error: float, target: RetrievalTarget = "value") -> RetrievalHead:
    """Softmax attention that solves the task to within ``error`` in every coordinate, with the sink that it needs.

    ``c`` times the scores of :func:`relu_solution`, and ``c`` for content tokens on BOS, whose value is 0. A content token at
    place ``i`` has ``i`` scores of 0 or less besides, and a weight of ``i / (e^c + i)`` or less off BOS, which bounds its
    output because no coordinate is above 1. The trigger at place ``j`` has ``j`` scores of 0 beside the one that it asks for;
    it is off by ``2 j / (e^c + j)`` or less. So ``e^c = (length - 1)(2/ε - 1)`` will do.

    Args:
        length: longest sequence for which the error holds, at least 4.
        error: ``ε``, in (0, 1/2].
    """
    solution = relu_solution(keys, values, target)
    score = solution.score.clone()
    score[CONTENT, BOS] = 1
    return RetrievalHead(math.log((length - 1) * (2 / error - 1)) * score, solution.value, "softmax")


def _value_map(keys: int, values: int, target: RetrievalTarget) -> Tensor:
    """The tokens without the mark of BOS, or their values alone."""
    diagonal = torch.ones(FIRST_KEY + keys + values, dtype=torch.float64)
    diagonal[: FIRST_KEY + keys if target == "value" else BOS + 1] = 0
    return torch.diag(diagonal)
