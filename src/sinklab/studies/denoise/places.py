"""Where the sinks of every text and head are in one state, and what became of them in the next."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher

__all__ = ["Changes", "KeyShares", "changes"]


class KeyShares(Watcher):
    """Keeps the mean share of every key, over the queries that see it, by text and head: of texts short enough to be denoised.

    Attributes:
        heads: layer and head of each row of :attr:`shares`, in order.
    """

    name: ClassVar[str] = "key_shares"
    needs: ClassVar[frozenset[str]] = frozenset({"columns"})

    def __init__(self) -> None:
        self.heads: list[tuple[int, int]] = []
        self._found: list[Tensor] = []

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        share, count = statistics.column_share, statistics.column_count
        assert share is not None  # asked for in ``needs``
        assert count is not None
        self.heads += [(call.site.layer, head) for head in call.head_numbers]
        self._found.append((share / count.clamp_min(1.0)).float().cpu())

    @property
    def shares(self) -> Tensor:
        """float32 ``(texts, heads, length)``: a row of weights divided by its sum, mean over rows; of all layers together."""
        return torch.cat(self._found, dim=1)


@dataclasses.dataclass(frozen=True)
class Changes:
    """Boolean ``(texts, heads)`` each, of the step between two states.

    Attributes:
        before: there is a sink before.
        both: before and behind.
        moves: before and behind, and no key is a sink in both.
        vanishes: before, and not behind.
    """

    before: Tensor
    both: Tensor
    moves: Tensor
    vanishes: Tensor


def changes(before: Tensor, behind: Tensor) -> Changes:
    """What became of the sinks of a state in the next one.

    A head that has two sinks and keeps one of them has not moved: which of the two is stronger may change by a hair.

    Args:
        before, behind: boolean ``(texts, heads, length)``, which keys are sinks.
    """
    has_sink, has_next = before.any(-1), behind.any(-1)
    stays = (before & behind).any(-1)
    return Changes(has_sink, has_sink & has_next, has_sink & has_next & ~stays, has_sink & ~has_next)
