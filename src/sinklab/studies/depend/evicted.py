"""Sink evicted: nothing leaves the cache but the first tokens, on purpose: a score without them and with all else."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from sinklab.policies.base import Positions, SlotPolicy

__all__ = ["SinkEvicted"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkEvicted(SlotPolicy):
    """The full cache, from which the first ``num_sinks`` tokens leave one by one when tokens ``at``, ``at + 1``, … are written.

    A window without sinks evicts everything that is old; here the sink alone goes, at the moment at which it would leave a
    window of ``at - 1`` tokens. Positions are those of the text, and nothing moves.

    Attributes:
        num_sinks: first tokens that leave, at most ``at``.
        at: token with which the first of them leaves.
        length: tokens of the longest text that is read; of a longer one the last slot would be written over.
    """

    name: ClassVar[str] = "sink_evicted"

    positions: Positions = "original"
    num_sinks: int = 4
    at: int = 1024
    length: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("num_sinks", 1)
        self._require("at", self.num_sinks, ": the tokens that leave must have been written")
        self._require("length", self.at + self.num_sinks, ": the text must be long enough that they leave")

    @property
    def num_slots(self) -> int:
        return self.length - self.num_sinks

    def slots(self, tokens: Tensor) -> Tensor:
        freed = (tokens >= self.at) & (tokens < self.at + self.num_sinks)
        behind = (tokens - self.num_sinks).clamp(max=self.num_slots - 1)
        return tokens.where(tokens < self.at, (tokens - self.at).where(freed, behind))

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        gone = (key_positions < self.num_sinks) & (query_positions >= key_positions + self.at)
        return (key_positions <= query_positions) & ~gone

    def describe(self) -> str:
        return f"full, first {self.num_sinks} evicted"
