"""Relative positions of T5: a learned number for each head and bucket of distances is added to the scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from sinklab.configuration import Section
from sinklab.positions._buckets import BucketSettings, bucket_numbers
from sinklab.positions.base import DecoderShape, PositionScheme, distances
from sinklab.registry import positions


@positions.register("relative")
class Relative(PositionScheme):
    """``score[t, i] + table[bucket(t - i), head]``; one table for all layers. Raffel et al. 2020 (arXiv 1910.10683).

    Gu et al. 2024 (arXiv 2410.10781) describe this scheme and released another one: see ``bucket_index``.
    """

    biased: ClassVar[bool] = True
    Settings: ClassVar[type[Section]] = BucketSettings

    def __init__(self, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().__init__(architecture, settings)
        self.std = architecture.hidden_size**-0.5  # T5's own
        self.num_buckets, self.max_distance = self.settings.num_buckets, self.settings.max_distance
        self.table = nn.Parameter(torch.empty(self.num_buckets, architecture.num_attention_heads))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def score_bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        buckets = bucket_numbers(distances(query_positions, key_positions), self.num_buckets, self.max_distance)
        return nn.functional.embedding(buckets[:, 0], self.table.float()).permute(0, 3, 1, 2)
