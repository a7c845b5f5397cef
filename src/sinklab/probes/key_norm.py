"""Norm of the keys by layer, key-value head and position: sinks of trained models have small keys."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.probes._shared import CacheNorm
from sinklab.registry import probes
from sinklab.results.metric import Metric

KEY_NORM = Metric(
    "key_norm",
    "norm",
    "Mean over documents of the L2 norm of the key at this position; the column head is the key-value head.",
    paper="Gu et al. 2024 (arXiv 2410.10781)",
    range=(0.0, float("inf")),
)


@probes.register("key_norm")
class KeyNorm(CacheNorm):
    """Mean L2 norm of the keys per key-value head and position; under cached decoding only new keys are counted."""

    metrics: ClassVar[tuple[Metric, ...]] = (KEY_NORM,)

    def vectors(self, call: AttentionCall) -> Tensor:
        return call.keys
