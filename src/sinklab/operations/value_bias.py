"""Value bias: softmax attention with a learned vector added to the output of each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.operation import HeadShape, State
from sinklab.operations._bias import INITIAL_STD
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("value_bias")
@dataclass(frozen=True, kw_only=True)
class ValueBias(Softmax):
    """``outputs = softmax(scores) · values + v*``; weights in [0, 1], rows sum to one, and there is no null mass.

    "V biases" of Gu et al. 2024 (arXiv 2410.10781), table 4: a vector for the output, and no place for surplus mass.

    The parameter is ``value``, ``(num_heads, value_dim)``, or ``(1, value_dim)`` if shared; normal with standard deviation 0.02
    at the start.

    Args:
        shared: one ``v*`` for all heads of a layer.
    """

    shared: bool = False

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        return {"value": torch.normal(0.0, INITIAL_STD, (1 if self.shared else shape.num_heads, shape.value_dim))}

    def output_bias(self, state: State) -> Tensor:
        return state["value"]
