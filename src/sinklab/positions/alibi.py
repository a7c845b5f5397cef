"""ALiBi: a penalty that grows linearly with the distance is added to the scores, at a fixed slope for each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.positions.base import DecoderShape, PositionScheme, distances
from sinklab.registry import positions


@positions.register("alibi")
class Alibi(PositionScheme):
    """``score[t, i] + slope_h · (i - t)`` with ``slope_h = 2^(-8h/H)`` for heads ``h = 1 … H``. Press et al. 2022 (2108.12409).

    The formula serves every number of heads; where ``H`` is not a power of two, the paper's code interleaves two such series.
    """

    biased: ClassVar[bool] = True

    def __init__(self, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().__init__(architecture, settings)
        self.num_heads = architecture.num_attention_heads

    def score_bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        heads = torch.arange(1, self.num_heads + 1, device=query_positions.device)
        slopes = torch.exp2(-8.0 * heads / self.num_heads)
        return -slopes[:, None, None] * distances(query_positions, key_positions)
