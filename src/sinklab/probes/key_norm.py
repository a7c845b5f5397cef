"""Norm of the keys by layer, key-value head and position: sinks of trained models have small keys."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.probe import Definition
from sinklab.probes._cache_norm import CacheNorm
from sinklab.registry import probes

__all__ = ["KeyNorm"]


@probes.register("key_norm")
class KeyNorm(CacheNorm):
    """Mean L2 norm of the keys per key-value head and position; under cached decoding only new keys are counted."""

    metric: ClassVar[str] = "key_norm"
    definitions: ClassVar[dict[str, Definition]] = {
        "key_norm": Definition(
            "Mean over documents of the L2 norm of the key at this position; the column head is the key-value head.",
            "norm",
            "Gu et al. 2024 (arXiv 2410.10781)",
            (0.0, float("inf")),
        )
    }

    def vectors(self, call: AttentionCall) -> Tensor:
        return call.keys
