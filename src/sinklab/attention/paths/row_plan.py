"""Row plan: which rows of which heads are worked on at a time, and which keys they need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["Block", "HeadSlices", "RowPlan"]

_ROWS = 256
"""Rows of a block, over the heads of a group. Fewer make slower products, more waste arithmetic above the diagonal."""
_SHORT, _FEW = 1024, 128
"""Up to this many keys half of the rows suffice: with several heads at a time the products are large enough all the same."""
_SCORES = 2**20
"""Scores of a block beyond which it has fewer rows, so that a long sequence does not leave the cache. Up to half of them, heads
are taken together, so that a short sequence does not spend its time between the products."""


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Some rows, the keys that one of them sees, and among these the range in which some rows do not see some keys.

    Attributes:
        keys: needed keys; at least one, so that there is a row to weigh.
        edge: keys, counted from ``keys.start``, outside of which every row sees every key; ``None`` if that is so everywhere.
        hidden: boolean ``(rows, edge)``; ``None`` if the edge is the causal triangle.
        counts: visible keys of every row, in the dtype of the scores, over and over for all heads that are taken together:
            ``(heads · rows, 1)``.
        blank: boolean, likewise: rows that see no key; ``None`` if there are none.
    """

    rows: slice
    keys: slice
    edge: slice | None
    hidden: Tensor | None
    counts: Tensor
    blank: Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)
class HeadSlices:
    """Query heads that are worked on together, and their key-value heads."""

    heads: slice
    kv_heads: slice

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads.stop - self.kv_heads.start


class RowPlan:
    """The parts of every sample; blocks are planned once for each mask that differs.

    Args:
        queries, keys: as in :class:`~sinklab.attention.inputs.Inputs`.
        visible: boolean ``(batch or 1, num_heads or 1, q_len or 1, kv_len or 1)``, or ``None``.
        causal: query ``i`` sees keys ``0 … i``.
        dtype: of the scores.
    """

    def __init__(self, queries: Tensor, keys: Tensor, visible: Tensor | None, causal: bool, dtype: torch.dtype) -> None:
        self.visible, self.causal, self.dtype, self.device = visible, causal, dtype, queries.device
        self.q_len, self.kv_len = queries.shape[2], keys.shape[2]
        self.num_heads, self.num_kv_heads = queries.shape[1], keys.shape[1]
        self.by_head = visible is not None and visible.shape[1] > 1
        groups = 1 if self.by_head else self.num_heads // self.num_kv_heads
        rows = min(_ROWS if self.kv_len > _SHORT else _FEW, _SCORES // self.kv_len) // groups
        self.rows = min(max(16, rows), self.q_len)
        size = self.rows * groups * self.kv_len
        self.together = 1 if self.by_head else min(self.num_kv_heads, max(1, 2**19 // size))
        self.heads = self.together * groups
        self.place: tuple[int, int] | None = None
        self.blocks: list[Block] = []

    def parts(self, sample: int) -> Iterator[tuple[HeadSlices, Block]]:
        """All heads and rows of a sample."""
        groups = self.num_heads // self.num_kv_heads
        if self.by_head:
            parts = [HeadSlices(slice(h, h + 1), slice(h // groups, h // groups + 1)) for h in range(self.num_heads)]
        else:
            starts = range(0, self.num_kv_heads, self.together)
            shared = [slice(start, min(start + self.together, self.num_kv_heads)) for start in starts]
            parts = [HeadSlices(slice(kv.start * groups, kv.stop * groups), kv) for kv in shared]
        for part in parts:
            for block in self._blocks(sample, part.heads.start):
                yield part, block

    def _blocks(self, sample: int, head: int) -> list[Block]:
        batch, heads = (1, 1) if self.visible is None else self.visible.shape[:2]
        cell = (sample % batch, head % heads)
        if cell != self.place:
            mask = None if self.visible is None else self.visible[cell].expand(self.q_len, self.kv_len)
            starts = range(0, self.q_len, self.rows)
            rows = [slice(start, min(start + self.rows, self.q_len)) for start in starts]
            self.place, self.blocks = cell, [self._causal(part) if mask is None else self._masked(part, mask) for part in rows]
        return self.blocks

    def _causal(self, rows: slice) -> Block:
        if not self.causal:
            counts = torch.full((rows.stop - rows.start, 1), float(self.kv_len), dtype=self.dtype, device=self.device)
            return Block(rows, slice(0, self.kv_len), None, None, counts.repeat(self.heads, 1), None)
        counts = torch.arange(rows.start + 1, rows.stop + 1, dtype=self.dtype, device=self.device)
        stop = min(rows.stop, self.kv_len)
        edge = slice(rows.start, stop) if rows.start < stop else None
        return Block(rows, slice(0, stop), edge, None, counts.clamp_(max=self.kv_len)[:, None].repeat(self.heads, 1), None)

    def _masked(self, rows: slice, mask: Tensor) -> Block:
        seen = mask[rows]
        needed = seen.any(dim=0).nonzero()
        keys = slice(int(needed[0]), int(needed[-1]) + 1) if len(needed) else slice(0, 1)
        seen = seen[:, keys]
        partly = (~seen.all(dim=0)).nonzero()
        edge = slice(int(partly[0]), int(partly[-1]) + 1) if len(partly) else None
        hidden = None if edge is None else ~seen[:, edge]
        counts = seen.sum(dim=1, keepdim=True).repeat(self.heads, 1)
        blank = counts == 0
        return Block(rows, keys, edge, hidden, counts.to(self.dtype), blank if bool(blank.any()) else None)
