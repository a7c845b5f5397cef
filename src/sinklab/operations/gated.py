"""Gated attention: a sigmoid gate on the head outputs, computed from the input of the attention layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from sinklab.attention.operation import HeadShape, State
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations

__all__ = ["Gated"]

OPEN = 0.9
"""A gate that starts above it leaves a pre-trained model nearly as it was."""

INITIAL_STD = 0.02
"""Standard deviation of the gate's map at the start."""


@operations.register("gated")
@dataclass(frozen=True, kw_only=True)
class Gated(Softmax):
    """``outputs = gate ⊙ (softmax(scores) · values)``, ``gate = floor + (1 - floor) · sigmoid(W x + b)``, in (floor, 1).

    Qiu et al. 2025 (arXiv 2505.06708): ``x`` is the normed input of the layer at the query, and the gate acts before the output
    map. Weights are those of softmax: rows sum to one and there is no null mass; the gate is reported as the gain.

    The parameters are ``weight``, ``(num_heads or 1, value_dim or 1, hidden_size)``, normal with standard deviation 0.02 at the
    start, with ``double`` 0, and ``bias``, ``(num_heads or 1, value_dim or 1)``, where there is one.

    Args:
        element_wise: a gate for each coordinate of a head's output; otherwise one for the head.
        shared: one gate for all heads of a layer.
        input_dependent: otherwise the gate is ``sigmoid(b)``, learned and the same for every token.
        floor: the gate is squeezed to [floor, 1], from 0 to below 1; the paper tries 0.5.
        initial_bias: value of ``b`` at the start. By default there is no ``b``, as in the released models; a gate that does not
            depend on the input starts at 0.
        double: gate times two, in (0, 2), from a map that starts at 0: the start is softmax exactly, for a trained model
            (the authors' answer in issue 10 of their repository, December 2025). Not with ``floor`` or ``initial_bias``.
    """

    element_wise: bool = True
    shared: bool = False
    input_dependent: bool = True
    floor: float = 0.0
    initial_bias: float | None = None
    double: bool = False
    needs_layer_input: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require(0 <= self.floor < 1, f"floor = {self.floor} must be from 0 to below 1; at 1 the gate is always open")
        self.require(math.isfinite(self.initial_bias or 0.0), f"initial_bias = {self.initial_bias} must be a finite number")
        starts_at_one = not (self.floor or self.initial_bias)
        self.require(
            not self.double or starts_at_one,
            "double goes with neither floor nor initial_bias, by which the gate would not start at 1",
        )

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        size = (1 if self.shared else shape.num_heads, shape.value_dim if self.element_wise else 1)
        values = {}
        if self.input_dependent:
            values["weight"] = torch.normal(0.0, 0.0 if self.double else INITIAL_STD, (*size, shape.hidden_size))
        if self.initial_bias is not None or not self.input_dependent:
            values["bias"] = torch.full(size, float(self.initial_bias or 0.0))
        return values

    @property
    def at_start(self) -> str:
        start = self.floor + (1 - self.floor) / (1 + math.exp(-max(-700.0, self.initial_bias or 0.0)))
        start *= 2 if self.double else 1
        if start >= OPEN:
            return ""
        return (
            f"gates start near {start:.2g}: attention outputs start at {start:.2g} of what they were; double=true starts at 1, "
            "for a model that was trained without gates"
        )

    def gain(self, state: State) -> Tensor:
        if not self.input_dependent:
            return self._gate(state["bias"][None, :, None])
        given, weight = state["layer_input"], state["weight"]
        logits = linear(given, weight.flatten(0, 1).to(given.dtype)).unflatten(-1, weight.shape[:2]).transpose(1, 2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self._gate(logits + state["bias"][:, None] if "bias" in state else logits)

    def _gate(self, logits: Tensor) -> Tensor:
        gate = self.floor + (1 - self.floor) * torch.sigmoid(logits)
        return 2 * gate if self.double else gate
