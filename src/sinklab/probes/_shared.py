"""What probes share: a walk over visible tiles, norms of what is cached, and the sink that they are about."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from itertools import chain
from typing import ClassVar, Self

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.positions import by_position
from sinklab.attention.probe import Means, Probe
from sinklab.errors import ConfigurationError
from sinklab.results.metric import Metric, Row
from sinklab.sinks import Sinks

TILE = 256
"""Side of a tile; smaller wastes less beside the diagonal and asks more often."""


def visible_tiles(call: AttentionCall) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Ranges of queries and keys with at least one visible pair, and the block of visibility; ``None`` when all is visible."""
    for query in range(0, call.q_len, TILE):
        queries = slice(query, min(query + TILE, call.q_len))
        for key in range(0, call.kv_len, TILE):
            keys = slice(key, min(key + TILE, call.kv_len))
            tile = (queries.start, queries.stop, keys.start, keys.stop)
            state = call.visible.state(*tile)
            if state != "none":
                yield queries, keys, None if state == "all" else call.visible.block(*tile)


def keys_seen(call: AttentionCall) -> Tensor:
    """How many keys each query sees: int64 ``(batch, num_heads, q_len)``."""
    seen = torch.zeros(call.queries.shape[:3], dtype=torch.int64, device=call.queries.device)
    for queries, keys, block in visible_tiles(call):
        seen[:, :, queries] += keys.stop - keys.start if block is None else block.sum(dim=3)
    return seen


class MeanProbe(Probe):
    """Means by ``axes``, behind those of all heads together where they are ``pooled``."""

    axes: ClassVar[tuple[str, ...]] = ("head", "key_position")
    pooled: ClassVar[bool] = False

    def __init__(self) -> None:
        self._means = Means(*self.axes)

    def rows(self) -> Iterator[Row]:
        return chain(self._means.pooled() if self.pooled else (), self._means.rows())


class CacheNorm(MeanProbe):
    """Mean L2 norm per key-value head and position; each cached vector is counted once, when it is new."""

    needs: ClassVar[frozenset[str]] = frozenset({"vectors"})

    @abc.abstractmethod
    def vectors(self, call: AttentionCall) -> Tensor:
        """``(batch, num_kv_heads, kv_len, size)``: keys or values."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        positions = call.key_positions.masked_fill(~new_keys(call), -1)
        norms = self.vectors(call).float().norm(dim=-1)
        counts = by_position(torch.ones_like(norms), positions)
        self._means.add(self.metrics[0], call.site, by_position(norms, positions), counts)


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


class SinkProbe(Probe):
    """Means by head of numbers about the main sink; the column ``sink`` of their rows says which that is.

    Args:
        sink_position: position of the sink inside each document, 0 or more; 0 is the first token.

    Attributes:
        sinks: what was found (:meth:`about`), or the position that was named.
        asked: the same; position 0 where no sink was found, which the rows then say.
    """

    apart: ClassVar[frozenset[Metric]] = frozenset()
    """Metrics that are about no sink."""

    def __init__(self, sink_position: int = 0) -> None:
        if sink_position < 0:
            raise ConfigurationError(f"sink_position {sink_position} must be 0 or more: positions count from the first token")
        self.sinks = self.asked = Sinks.at(sink_position)
        self._means = Means("head")

    @property
    def sink_position(self) -> int | str:
        """Place that the numbers are about: a position, ``"null"``, or ``"token 198"``."""
        return self.asked.require().place

    def about(self, sinks: Sinks) -> Self:
        """The same probe, with the sinks that were found."""
        self.sinks = sinks
        self.asked = sinks if sinks.main else Sinks.at(0)
        return self

    def rows(self) -> Iterator[Row]:
        sink = self.sinks.describe() if self.sinks.main else f"{self.asked.describe()} (no sink was found)"
        for row in chain(self._means.pooled(), self._means.rows()):
            yield row if row["metric"] in self.apart else row | {"sink": sink}
