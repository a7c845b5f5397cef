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
    of ``window + 1`` tokens for every token. Any causal model will do, also one with learned positions.

    With ``every`` above 1, tokens come in blocks of so many, ``every · m`` to ``every · m + every - 1``, and a block is read in
    one forward behind the ``window + 1 - every`` tokens before it: the strided sliding window by which perplexity is
    commonly measured. The last token of a block sees ``window`` tokens before it, the first ``every - 1`` fewer.

    Attributes:
        window: tokens before a token that are encoded with it, 1 or more.
        every: tokens that share a window, from 1 to ``window + 1``.
    """

    window: int = 1023
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions != "in_cache":
            raise ConfigurationError(
                f"policy 'recompute' counts positions from the start of each window; positions={self.positions!r} is not there"
            )
        self._require("window", 1, PREDECESSORS)
        if not 1 <= self.every <= self.window + 1:
            raise ConfigurationError(f"every {self.every} must be from 1 to {self.window + 1}, the tokens of a window")

    def max_held(self, seq_len: int) -> int:
        return min(seq_len, self.window + 1)

    def first(self, token: int) -> int:
        """Index of the first token of the window in which a token is read."""
        return max(0, (token // self.every + 1) * self.every - self.window - 1)

    def stop(self, token: int) -> int:
        """Index behind the last token that is read in the window of this one; all that fit share the first window."""
        return ((token // self.every + 1) if self.first(token) else (self.window + 1) // self.every) * self.every

    def computed(self, wanted: Sequence[range]) -> int:
        total = 0
        for span in wanted:
            token = span.start
            while token < span.stop:
                stop = min(span.stop, self.stop(token))
                total += stop - self.first(token)
                token = stop
        return total

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Whether each key is in the window of each query, and not behind it; token indices, boolean of the common shape.

        It is not all that counts: what a key says of the tokens before it also starts anew with every window.
        """
        first = (query_positions // self.every + 1) * self.every - self.window - 1
        return (key_positions >= first) & (key_positions <= query_positions)

    def describe(self) -> str:
        return f"recompute {self.window}" + (f", every {self.every}" if self.every > 1 else "")
