"""Blocks: the first tokens and the most recent whole blocks; models caches that cannot evict single tokens."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from sinklab.policies.base import SlotPolicy
from sinklab.registry import policies


@policies.register("blocks")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(SlotPolicy):
    """A query sees the first ``num_sinks`` tokens, its own block up to itself, and the ``blocks - 1`` blocks before that.

    After the sinks the text is cut into blocks of ``block`` tokens, which are evicted as a whole: paged caches drop pages of 16
    or 32 tokens, caches of video models drop frames, and llama.cpp, whose "context shift" gives up the older half when the
    context is full, is ``blocks=2``. So the number of tokens held varies: ``blocks * block`` at the end of a block, and
    ``block - 1`` fewer at the beginning of the next one. With blocks of one token it is
    :class:`~sinklab.policies.sink_window.SinkWindow`, to which its loss is compared at the same memory.

    Attributes:
        num_sinks: first tokens that stay, 0 or more; they are in no block.
        block: tokens of a block, 1 or more.
        blocks: how many blocks are held at most, that of the query included; 1 or more, and with one the first token of a
            block sees the sinks and itself.
        positions: ``in_cache`` or ``original``.
    """

    num_sinks: int = 4
    block: int = 512
    blocks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("num_sinks", 0)
        self._require("block", 1)
        self._require("blocks", 1)

    @classmethod
    def of_size(cls, held: int, num_sinks: int) -> dict[str, object]:
        """Two blocks, as a context shift has them."""
        num_sinks += (held + 1 - num_sinks) % 2
        return {"num_sinks": num_sinks, "block": (held + 1 - num_sinks) // 2, "blocks": 2}

    @property
    def pinned(self) -> tuple[int, ...]:
        return tuple(range(self.num_sinks))

    @property
    def num_slots(self) -> int:
        return self.num_sinks + self.block * self.blocks

    @property
    def holds_more(self) -> bool:
        # A block that has left is overwritten token by token.
        return self.block > 1

    def num_recent(self, query_positions: Tensor) -> Tensor:
        begun = (query_positions - self.num_sinks).remainder(self.block)
        return (self.blocks - 1) * self.block + begun + 1

    def slots(self, tokens: Tensor) -> Tensor:
        behind = tokens - self.num_sinks
        return tokens.where(behind < 0, behind.remainder(self.block * self.blocks) + self.num_sinks)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = query_positions - key_positions
        recent = distance < self.num_recent(query_positions)
        return (distance >= 0) & (recent | (key_positions < self.num_sinks))

    def describe(self) -> str:
        return f"{self.num_sinks}+{self.blocks}×{self.block}{self._mode}"
