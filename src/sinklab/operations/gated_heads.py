"""Gated heads: each head is opened by a gate that reads the head's own slice of the layer's input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.operation import HeadShape, State
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.results.environment import require_memory

__all__ = ["GatedHeads"]

OPEN = 0.9
"""Gates that start above it leave a pre-trained model nearly as it was."""

INITIAL_STD = 0.02
"""Standard deviation of the hidden layer of an MLP gate at the start."""


@operations.register("gated_heads")
@dataclass(frozen=True, kw_only=True)
class GatedHeads(Softmax):
    """``outputs_h = sigmoid(G_h(x_h)) · (softmax(scores) · values)_h``: one gate for each head and query, in (0, 1).

    Bondarenko et al. 2023 (arXiv 2306.12929). ``x_h`` is the slice of ``hidden_size / num_heads`` features of the layer's input
    at the query that belongs to head h, and ``G_h`` is linear, an MLP with one hidden layer of ReLU, or a linear map of all
    features. Weights are those of softmax: rows sum to one and there is no null mass; the gate is reported as the gain.

    The parameters are ``weight``, ``(num_heads, features)``, features being the slice, the hidden units or everything, and
    ``bias``, ``(num_heads,)``; an MLP also has ``hidden_weight``, ``(num_heads, hidden, slice)``, and ``hidden_bias``,
    ``(num_heads, hidden)``. ``weight`` starts at zero, so that every gate starts at ``opening`` exactly.

    Args:
        hidden: hidden units of each head's MLP (4 and 64 in the paper); 0 makes the gate linear.
        all_features: each gate reads the whole input instead of the head's slice.
        opening: gate at the start, in (0, 1); the paper finds 0.25 to 0.9 usable for BERT and 0.1 to 0.5 for ViT.
        double: gate times two; with an opening of 0.5 the start is softmax, for fine-tuning.
    """

    hidden: int = 0
    all_features: bool = False
    opening: float = 0.5
    double: bool = False
    needs_layer_input: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require(self.hidden >= 0, f"hidden = {self.hidden} must be a number of units, or 0 for a linear gate")
        both = bool(self.hidden) and self.all_features
        self.require(not both, "hidden and all_features exclude each other; an MLP reads the head's slice")
        self.require(0 < self.opening < 1, f"opening = {self.opening} must be between 0 and 1, both excluded")

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        heads, hidden_size = shape.num_heads, shape.hidden_size
        self.require(
            self.all_features or hidden_size % heads == 0,
            f"the {hidden_size} features of the layer's input cannot be split evenly among {heads} heads; use all_features",
        )
        width = hidden_size if self.all_features else hidden_size // heads
        values = {}
        if self.hidden:
            require_memory(4 * heads * self.hidden * width, f"operation 'gated_heads': hidden = {self.hidden}")
            values["hidden_weight"] = torch.normal(0.0, INITIAL_STD, (heads, self.hidden, width))
            values["hidden_bias"] = torch.zeros(heads, self.hidden)
            width = self.hidden
        values["weight"] = torch.zeros(heads, width)
        values["bias"] = torch.full((heads,), math.log(self.opening / (1 - self.opening)))
        return values

    @property
    def at_start(self) -> str:
        start = self.opening * (2 if self.double else 1)
        if start >= OPEN:
            return ""
        return (
            f"gates start at {start:.2g}: attention outputs start at {start:.2g} of what they were; double=true with "
            "opening=0.5 starts at 1, for a model that was trained without gates"
        )

    def gain(self, state: State) -> Tensor:
        given = state["layer_input"]
        given = given.to(torch.promote_types(given.dtype, torch.float32))
        weight, bias = state["weight"].to(given.dtype), state["bias"].to(given.dtype)
        if self.all_features:
            logits = torch.einsum("bqf,hf->bhq", given, weight)
        else:
            features = given.unflatten(-1, (len(weight), -1))
            if self.hidden:
                hidden_weight, hidden_bias = state["hidden_weight"].to(given.dtype), state["hidden_bias"].to(given.dtype)
                features = torch.relu(torch.einsum("bqhf,hnf->bqhn", features, hidden_weight) + hidden_bias)
            logits = torch.einsum("bqhf,hf->bhq", features, weight)
        gate = torch.sigmoid(logits + bias[:, None])
        return (2 * gate if self.double else gate)[..., None]
