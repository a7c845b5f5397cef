"""Key-query retrieval at a trigger, and weights of one head that solve it: undivided ReLU without a sink, softmax with one."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

BOS, TRIGGER, CONTENT, FIRST_KEY = 0, 1, 2, 3
"""Coordinates that mark the three kinds of token, and the first of the keys; values stand behind the keys."""

RetrievalTarget = Literal["value", "token"]
"""What the trigger answers: the value of the token that it asks for, or the token as it is."""


@dataclasses.dataclass(frozen=True)
class RetrievalBatch:
    """Sequences with one trigger each, at ``positions``, that asks for the token at ``asked``; 0-based, ``(batch,)``."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    asked: Tensor

    @property
    def is_trigger(self) -> Tensor:
        """Boolean ``(batch, length)``."""
        return torch.arange(self.inputs.shape[1]) == self.positions[:, None]


def retrieval_batch(
    batch: int, length: int, keys: int, values: int, generator: torch.Generator, position: int | None, target: RetrievalTarget
) -> RetrievalBatch:
    """Sequences of the task, float64 ``(batch, length, 3 + keys + values)``; the trigger at ``position``, or anywhere."""
    positions = torch.full((batch,), position or 0)
    if position is None:
        positions = torch.randint(2, length, (batch,), generator=generator)
    rows, first_value = torch.arange(batch), FIRST_KEY + keys
    inputs = torch.zeros(batch, length, first_value + values, dtype=torch.float64)
    inputs[:, 0, BOS] = 1
    inputs[:, 1:, CONTENT] = 1
    # Distinct keys: the order of random numbers, of which each place takes one, and the trigger none of its own.
    order = torch.rand(batch, keys, generator=generator).argsort(dim=1)[:, : length - 2]
    places = torch.arange(1, length)
    which = (places - 1 - (places > positions[:, None]).long()).clamp(max=length - 3)
    inputs[:, 1:, FIRST_KEY:first_value] = torch.nn.functional.one_hot(order.gather(1, which), keys).double()
    inputs[:, 1:, first_value:] = 2 * torch.rand(batch, length - 1, values, generator=generator, dtype=torch.float64) - 1
    asked = 1 + (torch.rand(batch, generator=generator) * (positions - 1)).long()  # before the trigger, and not BOS
    inputs[rows, positions] = 0
    inputs[rows, positions, TRIGGER] = 1
    inputs[rows, positions, FIRST_KEY:first_value] = inputs[rows, asked, FIRST_KEY:first_value]
    targets = torch.zeros_like(inputs)
    targets[rows, positions] = inputs[rows, asked]
    if target == "value":
        targets[..., :first_value] = 0
    return RetrievalBatch(inputs, targets, positions, asked)


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
