"""A walk over the visible part of a call, tile by tile, with the rule of visibility asked only where it is mixed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall

__all__ = ["keys_seen", "visible_tiles"]

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
