"""Key bias: a learned key that every query may attend to, with a value that is zero or fixed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.attention.operation import HeadShape, State
from sinklab.operations._bias import INITIAL_STD, bias_scores
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("key_bias")
@dataclass(frozen=True, kw_only=True)
class KeyBias(Softmax):
    """Softmax over the visible keys and a learned key ``k*``; in [0, 1), rows sum to less than one.

    "K biases" of Gu et al. 2024 (arXiv 2410.10781), tables 4 and 5. ``k*`` gets no rotary rotation, as in their release: its
    score is ``queries · k* · scaling`` with the queries as they reach the attention function. Its share is the null mass, so
    weights and null mass sum to one; times ``v*`` it is added to the output.

    ``k*`` belongs to a query head, under grouped queries too. The parameter is ``key``, ``(num_heads, head_dim)``, or
    ``(1, head_dim)`` if shared; normal with standard deviation 0.02 at the start.

    Args:
        shared: one ``k*`` for all heads of a layer.
        learnable: only so many coordinates of ``k*`` are learned, from 1 to head_dim; the others stay zero. All by default.
        value_norm: length of ``v*``, which is not learned; from 0, the default.
        value_ones: ``v*`` points along (1, …, 1) instead of the first coordinate (v'' and v' of table 5).
    """

    shared: bool = False
    learnable: int | None = None
    value_norm: float = 0.0
    value_ones: bool = False

    def __post_init__(self) -> None:
        some = self.learnable is None or self.learnable >= 1
        self.require(some, f"learnable = {self.learnable} must be at least 1; a key of zeros is softmax_plus_one")
        a_length = math.isfinite(self.value_norm) and self.value_norm >= 0
        self.require(a_length, f"value_norm = {self.value_norm} must be a length, finite and not negative")
        turned = self.value_ones and self.value_norm == 0
        self.require(not turned, "value_ones gives a direction to a value of length 0; set value_norm too")

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        there = self.learnable is None or self.learnable <= shape.head_dim
        self.require(there, f"learnable = {self.learnable} exceeds the {shape.head_dim} numbers of a key")
        self.require(
            not self.value_norm or shape.value_dim == shape.head_dim,
            f"value_norm needs values as long as keys; these heads have {shape.value_dim} and {shape.head_dim}. Use "
            "key_value_bias",
        )
        key = torch.zeros(1 if self.shared else shape.num_heads, shape.head_dim)
        key[:, : self.learnable] = torch.normal(0.0, INITIAL_STD, (len(key), self.learnable or shape.head_dim))
        return {"key": key}

    def null_scores(self, queries: Tensor, scaling: float, state: State) -> Tensor:
        # The coordinates that are not learned are zero. Left out, they get a gradient of zero and stay it.
        return bias_scores(queries[..., : self.learnable], state["key"][:, : self.learnable], scaling)

    def null_value(self, state: State) -> Tensor | None:
        if self.value_norm == 0:
            return None
        size = state["key"].shape[1]
        if self.value_ones:
            return state["key"].new_full((1, size), self.value_norm / math.sqrt(size))
        return pad(state["key"].new_full((1, 1), self.value_norm), (0, size - 1))
