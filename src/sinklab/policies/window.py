"""Window: only the most recent tokens, without a sink; the baseline that breaks."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from sinklab.policies.base import PREDECESSORS, SlotPolicy
from sinklab.registry import policies


@policies.register("window")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(SlotPolicy):
    """A query sees the ``window`` tokens before it, and itself: ``0 <= query - key <= window``.

    "Window attention" of Xiao et al. 2024 (arXiv 2309.17453), written "0+1024": as soon as the first token has left, models
    that need the sink break. It is :class:`~sinklab.policies.sink_window.SinkWindow` without
    sinks. No distance between tokens that are held ever changes, so both kinds of positions are the same.

    Attributes:
        window: tokens before the query that are held besides it, 1 or more.
        positions: ``in_cache`` or ``original``.
    """

    window: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("window", 1, PREDECESSORS)

    @property
    def num_slots(self) -> int:
        return self.window + 1

    def slots(self, tokens: Tensor) -> Tensor:
        return tokens.remainder(self.window + 1)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = query_positions - key_positions
        return (distance >= 0) & (distance <= self.window)

    def describe(self) -> str:
        return f"0+{self.window}"
