"""Bucket index: the number of T5's bucket itself is added to the scores, so that far keys gain; nothing is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from sinklab.configuration import Section
from sinklab.positions._buckets import BucketSettings, bucket_numbers
from sinklab.positions.base import DecoderShape, PositionScheme, distances
from sinklab.registry import positions


@positions.register("bucket_index")
class BucketIndex(PositionScheme):
    """``score[t, i] + bucket(t - i)``, the same for all heads: from 0 for the query's own key to 31 for distant ones.

    What the release of Gu et al. 2024 (arXiv 2410.10781) computes under the name "relative"; their table 3 has its loss of 5.45
    beside 3.7 to 3.8 of every other scheme. The buckets are T5's, here computed in float32 (theirs in bfloat16).
    """

    biased: ClassVar[bool] = True
    Settings: ClassVar[type[Section]] = BucketSettings

    def __init__(self, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().__init__(architecture, settings)
        self.num_buckets, self.max_distance = self.settings.num_buckets, self.settings.max_distance
        self.num_heads = architecture.num_attention_heads

    def score_bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        buckets = bucket_numbers(distances(query_positions, key_positions), self.num_buckets, self.max_distance)
        return buckets.float().expand(-1, self.num_heads, -1, -1)
