"""Relative positions of T5: a learned number for each head and bucket of distances is added to the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from sinklab.configuration import Section
from sinklab.errors import ConfigurationError
from sinklab.positions.base import DecoderShape, PositionScheme, distances
from sinklab.registry import positions

__all__ = ["BucketSettings", "Relative", "bucket_numbers"]


class BucketSettings(Section):
    """How distances are put into buckets."""

    num_buckets: int = Field(32, ge=2, description="buckets; the first half holds one distance each")
    max_distance: int = Field(128, ge=2, description="distances from here on share the last bucket")

    @model_validator(mode="after")
    def _check(self) -> BucketSettings:
        if self.max_distance <= self.num_buckets // 2:
            raise ConfigurationError(
                f"max_distance {self.max_distance} must exceed num_buckets / 2 = {self.num_buckets // 2}, the distances that "
                "have a bucket each"
            )
        return self


def bucket_numbers(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance (int64, not negative), int64 in ``[0, num_buckets)``, never falling with the distance.

    The one-directional buckets of T5's decoder (Raffel et al. 2020, arXiv 1910.10683), to the number.
    """
    exact = num_buckets // 2
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return torch.where(distance < exact, distance, far)


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
