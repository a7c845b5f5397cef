"""Norms of what attention caches: the common part of ``key_norm`` and ``value_norm``."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.positions import by_position
from sinklab.attention.probe import Means, Probe, require_same
from sinklab.results.metric import Row

__all__ = ["CacheNorm", "new_keys"]


class CacheNorm(Probe):
    """Mean L2 norm per key-value head and position; each cached vector is counted once, when it is new."""

    needs: ClassVar[frozenset[str]] = frozenset({"vectors"})

    def __init__(self) -> None:
        self._means = Means("head", "key_position")

    @abc.abstractmethod
    def vectors(self, call: AttentionCall) -> Tensor:
        """``(batch, num_kv_heads, kv_len, size)``: keys or values."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        positions = call.key_positions.masked_fill(~new_keys(call), -1)
        norms = self.vectors(call).float().norm(dim=-1)
        counts = by_position(torch.ones_like(norms), positions)
        self._means.add(self.metrics[0], call.site, by_position(norms, positions), counts)

    def merge(self, other: Self) -> None:
        require_same(self, other)
        self._means.merge(other._means)

    def rows(self) -> Iterator[Row]:
        return self._means.rows()


def new_keys(call: AttentionCall) -> Tensor:
    """Boolean ``(batch, kv_len)``: the keys that this call brought, and not an earlier call of the same sequence.

    Told by position, because the key tensor of a sliding cache begins anywhere and that of a static cache ends in empty slots.
    """
    if call.cached_keys == 0:
        return call.key_positions >= 0
    if call.site.kind == "cross":
        return torch.zeros_like(call.key_positions, dtype=torch.bool)
    last = torch.iinfo(torch.int64).max
    first = torch.where(call.counted, call.query_positions, last).amin(dim=1, keepdim=True)
    return call.key_positions >= first
