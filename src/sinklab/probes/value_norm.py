"""Norm of the values by layer, key-value head and position: sinks of trained models have small values."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.probes._shared import CacheNorm
from sinklab.registry import probes
from sinklab.results.metric import Metric

VALUE_NORM = Metric(
    "value_norm",
    "norm",
    "Mean over documents of the L2 norm of the value at this position; the column head is the key-value head.",
    paper="Gu et al. 2024 (arXiv 2410.10781)",
    range=(0.0, float("inf")),
)


@probes.register("value_norm")
class ValueNorm(CacheNorm):
    """Mean L2 norm of the values per key-value head and position; under cached decoding only new values are counted."""

    metrics: ClassVar[tuple[Metric, ...]] = (VALUE_NORM,)

    def vectors(self, call: AttentionCall) -> Tensor:
        return call.values
