"""Key-value bias: a learned key and value in front of the others, one pair for each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.operation import HeadShape, State
from sinklab.operations._bias import INITIAL_STD, bias_scores
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("key_value_bias")
@dataclass(frozen=True, kw_only=True)
class KeyValueBias(Softmax):
    """Softmax over the visible keys and a learned key ``k*`` with a learned value ``v*``; in [0, 1), rows sum to less than one.

    "KV biases" of Gu et al. 2024 (arXiv 2410.10781), table 4; the explicit attention bias of Sun et al. 2024 (arXiv
    2402.17762). Every query sees ``k*``, which gets no rotary rotation. Its share is the null mass, so weights and null mass
    sum to one; times ``v*`` it is added to the output.

    Both belong to a query head, under grouped queries too. The parameters are ``key``, ``(num_heads, head_dim)``, and
    ``value``, ``(num_heads, value_dim)``, with 1 for num_heads if shared; normal with standard deviation 0.02 at the start.

    Args:
        shared: one pair for all heads of a layer.
    """

    shared: bool = False

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        heads = 1 if self.shared else shape.num_heads
        return {
            "key": torch.normal(0.0, INITIAL_STD, (heads, shape.head_dim)),
            "value": torch.normal(0.0, INITIAL_STD, (heads, shape.value_dim)),
        }

    def null_scores(self, queries: Tensor, scaling: float, state: State) -> Tensor:
        return bias_scores(queries, state["key"], scaling)

    def null_value(self, state: State) -> Tensor:
        return state["value"]
