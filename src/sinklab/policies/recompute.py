"""Recompute: the window is encoded again for every token; the expensive reference for bounded caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.policies.base import PREDECESSORS, Policy
from sinklab.registry import policies


@policies.register("recompute")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute(Policy):
    """Each token is read at the end of a text of its own: the ``window`` tokens before it and itself, at positions from 0.

    "Sliding window with re-computation" of Xiao et al. 2024 (arXiv 2309.17453): no key or value is older than its window, so
    the first token of each window is its sink, and nothing is out of the range that a model was trained on. It needs a forward
    of ``window + 1`` tokens for every token behind the first window. Any causal model will do, also one with learned positions.

    Attributes:
        window: tokens before a token that are encoded with it, 1 or more.
    """

    window: int = 1023

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions != "in_cache":
            raise ConfigurationError(
                f"policy 'recompute' counts positions from the start of each window; positions={self.positions!r} is not there"
            )
        self._require("window", 1, PREDECESSORS)

    def max_held(self, seq_len: int) -> int:
        return min(seq_len, self.window + 1)

    def computed(self, wanted: Sequence[range]) -> int:
        total, size = 0, self.window + 1
        for span in wanted:
            shared = min(span.stop, size)  # the first window is read at once
            total += (shared if span.start < size else 0) + size * (span.stop - max(span.start, shared))
        return total

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Whether each key is in the window of each query, and not behind it; token indices, boolean of the common shape.

        It is not all that counts: what a key says of the tokens before it also starts anew with every window.
        """
        return (key_positions >= query_positions - self.window) & (key_positions <= query_positions)

    def describe(self) -> str:
        return f"recompute {self.window}"
