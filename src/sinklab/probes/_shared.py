"""What probes share: rows that grow, a walk over visible tiles, norms of what is cached, and the sink that they are about."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import ClassVar, Self

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.positions import by_position
from sinklab.attention.probe import Means, Probe, require_same
from sinklab.errors import ConfigurationError, SessionError
from sinklab.results.metric import Metric, Row
from sinklab.sinks import Sinks

_POSITION_BITS, _DOCUMENT_BITS = 30, 17

NOTHING = (1 << _POSITION_BITS) - 1
"""Pseudo position of the learned sink logit."""


@dataclasses.dataclass
class EndedColumns:
    """Columns of all documents of one batch at one module, their sequences having ended.

    Attributes:
        site: the module.
        positions: int64 ``(columns,)``; :data:`NOTHING` for the null mass.
        sums: float64 ``(columns, heads)``: weight on the column, summed over the queries that see it.
        counts: float64, same shape: how many queries those are; at least one.
    """

    site: Site
    positions: Tensor
    sums: Tensor
    counts: Tensor


@dataclasses.dataclass
class _Open:
    site: Site
    batch: int
    codes: Tensor
    sums: Tensor
    counts: Tensor
    trace: Tensor | None


class GrowingColumns:
    """Adds up the columns of each document over the calls of one sequence.

    A column is known by batch row, document and position, not by its place in the key tensor, so sliding caches that drop
    early keys go on adding to the right columns. A call without cached keys starts new sequences and ends those before.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], _Open] = {}

    def add(self, call: AttentionCall, sums: Tensor, counts: Tensor, null_mass: Tensor | None) -> EndedColumns | None:
        """Take in one call; returns the documents that it ended, if any.

        Args:
            call: for positions and documents.
            sums: ``(batch, heads, kv_len)`` column sums over counted queries.
            counts: same shape, counted queries that see the key.
            null_mass: ``(batch, heads, q_len)`` null mass, where it is a column of its own.

        Raises:
            SessionError: the call goes on with cached keys and another number of rows, with rows in another order, or after
                tokens were taken back.
        """
        fresh = _columns(call.key_positions, call.key_documents, sums, counts)
        if null_mass is not None:
            nowhere = torch.where(call.counted, NOTHING, -1)
            ones = torch.ones_like(null_mass)
            fresh = _joined(fresh, _columns(nowhere, call.query_documents, null_mass, ones))
        key, batch, trace = (call.site.module, call.site.kind), call.queries.shape[0], _trace(call)
        known = self._open.pop(key, None)
        if known is not None and call.cached_keys > 0:
            if known.batch != batch:
                raise SessionError(
                    f"{call.site.module}: a sequence with cached keys went on with {batch} rows after {known.batch}; rows that "
                    "are added, dropped or reordered (beam search) cannot be followed: decode greedily or by sampling, with "
                    "num_beams=1"
                )
            _require_followed(call, known.trace, trace)
            fresh = _joined((known.codes, known.sums, known.counts), fresh)
            known = None
        self._open[key] = _Open(call.site, batch, *fresh, trace)
        return None if known is None else _closed(known)

    def finish(self) -> list[EndedColumns]:
        """End every open sequence."""
        ended = [_closed(known) for known in self._open.values()]
        self._open.clear()
        return ended


def _trace(call: AttentionCall) -> Tensor | None:
    """A bit of every key, ``(batch, keys written, 2)``, by which its row is known again; ``None`` of a cache that drops keys.

    A static cache has slots behind what is written.
    """
    written = call.cached_keys + call.queries.shape[2]
    return call.keys[:, 0, :written, :2].detach().clone() if written <= call.keys.shape[2] else None


def _require_followed(call: AttentionCall, before: Tensor | None, now: Tensor | None) -> None:
    """Refuse keys that are fewer than they were, or those of another row."""
    if before is None or now is None:
        return
    back = before.shape[1] - call.cached_keys
    if back > 0:
        raise SessionError(
            f"{call.site.module}: {back} tokens were taken back (assisted decoding, prompt look-up, crop) or another text went "
            "on in between (guidance_scale), and what looked at them cannot be taken out of the columns again: decode without, "
            "or measure each part in a session of its own"
        )
    here = now[:, : before.shape[1]]
    for row in (here != before).flatten(1).any(dim=1).nonzero().flatten().tolist():
        if bool((here[row] == before).flatten(1).all(dim=1).any()):
            raise SessionError(
                f"{call.site.module}: row {row} goes on with the cached keys of another row; rows that are reordered (beam "
                "search) cannot be followed: decode greedily or by sampling, with num_beams=1 (pipelines of speech take 5)"
            )


def _columns(positions: Tensor, documents: Tensor, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``(columns,)``, sorted and distinct, with sums and counts ``(columns, heads)`` in float64 on the CPU."""
    positions, documents = positions.cpu(), documents.cpu()
    rows = torch.arange(positions.shape[0])[:, None]
    codes = ((rows << _DOCUMENT_BITS) + documents << _POSITION_BITS) + positions
    counted = (positions >= 0) & (documents >= 0)

    def chosen(values: Tensor) -> Tensor:
        return values.detach().cpu().double().transpose(1, 2)[counted]

    columns = codes[counted], chosen(sums), chosen(counts)
    sorted_already = bool((columns[0][1:] > columns[0][:-1]).all())  # rows without padding in between
    return columns if sorted_already else _joined(columns)


def _joined(*parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of all parts, those of one code added up."""
    codes, index = torch.unique(torch.cat([part[0] for part in parts]), return_inverse=True)
    heads = parts[0][1].shape[1]
    sums, counts = (
        torch.zeros(len(codes), heads, dtype=torch.float64).index_add_(0, index, torch.cat([part[which] for part in parts]))
        for which in (1, 2)
    )
    return codes, sums, counts


def _closed(known: _Open) -> EndedColumns:
    return EndedColumns(known.site, known.codes & ((1 << _POSITION_BITS) - 1), known.sums, known.counts)


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

    def merge(self, other: Self) -> None:
        require_same(self, other)
        self._means.merge(other._means)

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
        sink_position: position of the sink inside each document; 0 is the first token.

    Raises:
        ConfigurationError: a position below 0, which no document has: positions are not counted from the end.

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

    def merge(self, other: Self) -> None:
        require_same(self, other, "sink_position")
        self._means.merge(other._means)

    def rows(self) -> Iterator[Row]:
        sink = self.sinks.describe() if self.sinks.main else f"{self.asked.describe()} (no sink was found)"
        for row in chain(self._means.pooled(), self._means.rows()):
            yield row if row["metric"] in self.apart else row | {"sink": sink}
