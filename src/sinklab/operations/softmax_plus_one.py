"""Softmax plus one: a constant 1 in the denominator lets a row sum to less than one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.operation import State
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("softmax_plus_one")
@dataclass(frozen=True, kw_only=True)
class SoftmaxPlusOne(Softmax):
    """``weights = exp(scores) / (1 + sum over visible keys of exp(scores))``; in [0, 1), rows sum to less than one.

    The "off-by-one" softmax of Miller 2023, pre-trained by Xiao et al. 2023 (arXiv 2309.17453) as "Zero Sink": attention to one
    more token whose key and value are zero. Its score is 0 for every query and its share is the null mass, so weights and null
    mass sum to one. It is the sink logit, frozen at 0.
    """

    def null_scores(self, queries: Tensor, scaling: float, state: State) -> Tensor:
        dtype = torch.promote_types(queries.dtype, torch.float32)
        return queries.new_zeros((1, queries.shape[1], 1), dtype=dtype)
