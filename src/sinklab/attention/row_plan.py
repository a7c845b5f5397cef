"""Row plan: blocks of rows of the score matrix, and which keys each of them needs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["Block", "Plans"]

_ROWS = 256
"""Rows of a block. Fewer make slower products, more waste arithmetic above the diagonal."""
_SCORES = 2**20
"""Scores of a block beyond which it has fewer rows, so that a long sequence does not leave the cache."""


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Some rows, the keys that one of them sees, and among these the range in which some rows do not see some keys.

    Attributes:
        keys: needed keys; at least one, so that there is a row to weigh.
        edge: keys, counted from ``keys.start``, outside of which every row sees every key; ``None`` if that is so everywhere.
        hidden: boolean ``(rows, edge)``; ``None`` if the edge is the causal triangle.
        counts: visible keys of every row ``(rows, 1)``, in the dtype of the scores.
        blank: boolean ``(rows, 1)``: rows that see no key; ``None`` if there are none.
    """

    rows: slice
    keys: slice
    edge: slice | None
    hidden: Tensor | None
    counts: Tensor
    blank: Tensor | None


class Plans:
    """The blocks of every head; planned once for each mask that differs."""

    def __init__(self, queries: Tensor, keys: Tensor, visible: Tensor | None, causal: bool, dtype: torch.dtype) -> None:
        self.visible, self.causal, self.dtype, self.device = visible, causal, dtype, queries.device
        self.q_len, self.kv_len = queries.shape[2], keys.shape[2]
        self.rows = min(_ROWS, self.q_len, max(16, _SCORES // self.kv_len))
        self.place: tuple[int, int] | None = None
        self.plan: list[Block] = []

    def of(self, sample: int, head: int) -> list[Block]:
        batch, heads = (1, 1) if self.visible is None else self.visible.shape[:2]
        place = (sample % batch, head % heads)
        if place != self.place:
            mask = None if self.visible is None else self.visible[place].expand(self.q_len, self.kv_len)
            starts = range(0, self.q_len, self.rows)
            rows = [slice(start, min(start + self.rows, self.q_len)) for start in starts]
            self.place, self.plan = place, [self._causal(part) if mask is None else self._masked(part, mask) for part in rows]
        return self.plan

    def _causal(self, rows: slice) -> Block:
        if not self.causal:
            counts = torch.full((rows.stop - rows.start, 1), float(self.kv_len), dtype=self.dtype, device=self.device)
            return Block(rows, slice(0, self.kv_len), None, None, counts, None)
        counts = torch.arange(rows.start + 1, rows.stop + 1, dtype=self.dtype, device=self.device)
        stop = min(rows.stop, self.kv_len)
        edge = slice(rows.start, stop) if rows.start < stop else None
        return Block(rows, slice(0, stop), edge, None, counts.clamp_(max=self.kv_len)[:, None], None)

    def _masked(self, rows: slice, mask: Tensor) -> Block:
        seen = mask[rows]
        needed = seen.any(dim=0).nonzero()
        keys = slice(int(needed[0]), int(needed[-1]) + 1) if len(needed) else slice(0, 1)
        seen = seen[:, keys]
        partly = (~seen.all(dim=0)).nonzero()
        edge = slice(int(partly[0]), int(partly[-1]) + 1) if len(partly) else None
        counts = seen.sum(dim=1, keepdim=True)
        blank = counts == 0
        return Block(
            rows,
            keys,
            edge,
            None if edge is None else ~seen[:, edge],
            counts.to(self.dtype),
            blank if bool(blank.any()) else None,
        )
