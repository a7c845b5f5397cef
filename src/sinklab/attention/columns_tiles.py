"""Tiles of the score matrix: which of them hold visible pairs, and how many queries see each key."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.visibility import TileState, Visibility

__all__ = ["QueryTile", "bucket_starts", "plan_tiles", "visible_counts"]

_GRAIN = 256
"""Width of the strips whose state is asked one by one; finer strips waste less beside the diagonal and cost more calls."""


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """A range of queries and the ranges of keys that at least one of them can see.

    Attributes:
        start, stop: half-open range of queries.
        keys: ``(start, stop, whole)`` in ascending order; ``whole`` when every pair of the tile is visible.
    """

    start: int
    stop: int
    keys: list[tuple[int, int, bool]]


def plan_tiles(visible: Visibility, q_len: int, kv_len: int, rows: int, columns: int) -> list[QueryTile]:
    """Cut the visible part of the score matrix into tiles of at most ``rows × columns``; hidden tiles are left out."""
    grain = min(_GRAIN, columns)
    tiles = []
    for start in range(0, q_len, rows):
        stop = min(start + rows, q_len)
        keys: list[tuple[int, int, bool]] = []
        for first, last, state in _runs(_strips(visible, start, stop, kv_len, grain, columns)):
            if state != "none":
                # Equal pieces: a run of 1280 keys is two tiles of 640 and not one of 1024 and a thin one.
                pieces = -(-(last - first) // columns)
                cuts = [first + (last - first) * piece // pieces for piece in range(pieces + 1)]
                keys += [(a, b, state == "all") for a, b in itertools.pairwise(cuts)]
        tiles.append(QueryTile(start, stop, keys))
    return tiles


def _strips(
    visible: Visibility, query_start: int, query_stop: int, kv_len: int, grain: int, columns: int
) -> Iterator[tuple[int, int, TileState]]:
    """States of successive strips of keys; a wide strip that is uniform is not asked about again."""
    wide = grain * max(1, columns // grain)
    for start in range(0, kv_len, wide):
        stop = min(start + wide, kv_len)
        state = visible.state(query_start, query_stop, start, stop)
        if state != "some" or wide == grain:
            yield start, stop, state
            continue
        for first in range(start, stop, grain):
            last = min(first + grain, stop)
            yield first, last, visible.state(query_start, query_stop, first, last)


def _runs(strips: Iterator[tuple[int, int, TileState]]) -> Iterator[tuple[int, int, TileState]]:
    """Join neighbouring strips of the same state."""
    run: tuple[int, int, TileState] | None = None
    for start, stop, state in strips:
        if run is not None and run[2] == state:
            run = (run[0], stop, state)
            continue
        if run is not None:
            yield run
        run = (start, stop, state)
    if run is not None:
        yield run


def visible_counts(call: AttentionCall, plan: list[QueryTile]) -> tuple[Tensor, Tensor]:
    """How many counted queries see each key, and how many keys each query sees.

    Returns:
        float32 ``(batch or 1, num_heads or 1, kv_len)`` and float32 ``(batch or 1, num_heads or 1, q_len)``; a dimension is
        1 when the counts do not depend on it. Exact: a count stays below 2**24.
    """
    counted = call.counted
    if bool(counted.all()):
        counted = counted[:1]
    # The rule tells its batch and head dimensions with its smallest block.
    batch, heads = call.visible.block(0, 1, 0, 1).shape[:2]
    device = call.queries.device
    columns = torch.zeros(max(batch, counted.shape[0]), heads, call.kv_len, device=device)
    rows = torch.zeros(batch, heads, call.q_len, device=device)
    for tile in plan:
        inside = counted[:, None, tile.start : tile.stop, None]
        for start, stop, whole in tile.keys:
            if whole:
                columns[:, :, start:stop] += inside.sum(dim=2)
                rows[:, :, tile.start : tile.stop] += stop - start
            else:
                block = call.visible.block(tile.start, tile.stop, start, stop)
                columns[:, :, start:stop] += (block & inside).sum(dim=2)
                rows[:, :, tile.start : tile.stop] += block.sum(dim=3)
    return columns, rows


def bucket_starts(q_len: int, num_buckets: int) -> list[int]:
    """Query indices at which buckets of (nearly) equal size start, and ``q_len`` at the end; short calls have empty buckets."""
    return [q_len * bucket // num_buckets for bucket in range(num_buckets + 1)]
