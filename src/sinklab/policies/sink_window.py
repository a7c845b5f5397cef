"""Sink and window: the first tokens, which carry the sink, and the most recent ones; StreamingLLM."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from sinklab.policies.base import PREDECESSORS, SlotPolicy
from sinklab.registry import policies


@policies.register("sink_window")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkWindow(SlotPolicy):
    """A query sees the first ``num_sinks`` tokens, the ``window`` tokens before it, and itself.

    Xiao et al. 2024 (arXiv 2309.17453), where it is written "4+1020". Their positions are those in the cache: once tokens have
    been evicted, the sinks stay right before the window. With ``positions="original"`` nothing moves and the distance
    to the sinks grows without bound.

    Attributes:
        num_sinks: first tokens that stay, 0 or more.
        window: tokens before the query that are held besides, 1 or more.
        positions: ``in_cache`` or ``original``.
    """

    num_sinks: int = 4
    window: int = 1020

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("num_sinks", 0)
        self._require("window", 1, PREDECESSORS)

    @property
    def pinned(self) -> tuple[int, ...]:
        return tuple(range(self.num_sinks))

    @property
    def num_slots(self) -> int:
        return self.num_sinks + self.window + 1

    def slots(self, tokens: Tensor) -> Tensor:
        behind = tokens - self.num_sinks
        return tokens.where(behind < 0, behind.remainder(self.window + 1) + self.num_sinks)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = query_positions - key_positions
        return (distance >= 0) & ((distance <= self.window) | (key_positions < self.num_sinks))

    def describe(self) -> str:
        return f"{self.num_sinks}+{self.window}{self._mode}"
