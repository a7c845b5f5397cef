"""The buckets of T5: near distances one by one, far ones in steps that grow with the logarithm."""

from __future__ import annotations

import math

import torch
from pydantic import Field, model_validator
from torch import Tensor

from sinklab.configuration import Section
from sinklab.errors import ConfigurationError


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
