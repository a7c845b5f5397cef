"""MLP kernel: queries and keys mapped by one small learned network; their product is the weight, of either sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.operation import HeadShape, State
from sinklab.attention.paths.linear import FeatureKernel
from sinklab.registry import operations


@operations.register("mlp_kernel")
@dataclass(frozen=True, kw_only=True)
class MlpKernel(FeatureKernel):
    """``weights = mlp(q) · mlp(k) · scaling``, divided by ``max(|row sum|, 1)`` if ``normalize``; any sign, any size.

    ``mlp(x) = second · relu(first · x)``: two linear maps of the size of a head, without biases, shared by queries, keys and
    all heads of a layer, as in the release of Gu et al. 2024 (arXiv 2410.10781); they act after rotary embedding. No sink
    appears either way. Their metric takes absolute values of signed weights.

    Args:
        normalize: divide each row by its sum where that is larger than 1 in size. Rows need not sum to one either way.
    """

    signed: ClassVar[bool] = True

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        """Maps ``first`` and ``second``, ``(head_dim, head_dim)``, normal with variance 0.4 / head_dim as in the release."""
        size = shape.head_dim
        return {name: torch.randn(size, size) * (0.4 / size) ** 0.5 for name in ("first", "second")}

    def features(self, queries: Tensor, keys: Tensor, state: State) -> tuple[Tensor, Tensor]:
        first, second = (state[name].to(queries.dtype) for name in ("first", "second"))
        mapped_queries, mapped_keys = (F.linear(F.relu(F.linear(states, first)), second) for states in (queries, keys))
        return mapped_queries, mapped_keys
