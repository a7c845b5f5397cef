"""Which keys a query may see, as small boolean rules that are asked tile by tile and never need a T × T tensor.

    causal        window=3       padding (left, 2)
    ■ ⬚ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ■ ■ ■
    ■ ■ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚     ⬚ ⬚ ■ ■ ■
    ■ ■ ■ ⬚ ⬚     ■ ■ ■ ⬚ ⬚     ⬚ ⬚ ■ ■ ■
    ■ ■ ■ ■ ⬚     ⬚ ■ ■ ■ ⬚     ⬚ ⬚ ■ ■ ■
    ■ ■ ■ ■ ■     ⬚ ⬚ ■ ■ ■     ⬚ ⬚ ■ ■ ■

Rules compose with ``&``. Tiles are half-open index ranges of the tensors at hand (not absolute positions).
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal

import torch
from torch import Tensor

TileState = Literal["all", "some", "none"]


@dataclasses.dataclass(frozen=True, eq=False)
class Band:
    """A rule by its bounds: query ``q`` sees the valid keys from ``q + low`` to ``q + high``, both included.

    Args:
        low, high: ``None`` where there is no bound.
        valid: boolean ``(batch, kv_len)``; ``None`` where every key is.
    """

    low: int | None = None
    high: int | None = None
    valid: Tensor | None = None

    def __and__(self, other: Band) -> Band:
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        valid = self.valid if other.valid is None else other.valid if self.valid is None else self.valid & other.valid
        return Band(max(lows, default=None), min(highs, default=None), valid)


class Visibility(abc.ABC):
    """A rule that says for each query and key whether the key is visible."""

    device: torch.device | str

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        """Boolean ``(batch or 1, heads or 1, query_stop - query_start, key_stop - key_start)``; true where visible."""
        keys = torch.arange(key_start, key_stop, device=self.device)
        return self.pairs(torch.arange(query_start, query_stop, device=self.device), keys)

    @abc.abstractmethod
    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The same of chosen queries and keys, int64 ``(some,)`` each on the rule's device, every query with every key."""

    def state(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> TileState:
        """Whether all, some or none of a tile is visible; ``"some"`` is always a correct answer, only a slower one."""
        block = self.block(query_start, query_stop, key_start, key_stop)
        return "all" if bool(block.all()) else "some" if bool(block.any()) else "none"

    def band(self) -> Band | None:
        """The rule by its bounds, or ``None`` where it is no band of keys around each query."""
        return None

    def unfolded(self) -> Visibility:
        """The rule without what hides folded sinks, for means over queries: these give a weight of nothing all the same."""
        return self

    def __and__(self, other: Visibility) -> Visibility:
        if isinstance(other, Everything):
            return self
        return other if isinstance(self, Everything) else And(self, other)


@dataclasses.dataclass(frozen=True)
class Everything(Visibility):
    """Every key is visible: an encoder without padding."""

    device: torch.device | str = "cpu"

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=self.device)

    def state(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> TileState:
        return "all"

    def band(self) -> Band:
        return Band()


@dataclasses.dataclass(frozen=True)
class Causal(Visibility):
    """Key ``k`` is visible to query ``q`` when ``k <= q + offset``; ``offset`` is how many keys precede the first query."""

    offset: int = 0
    device: torch.device | str = "cpu"

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys <= queries[:, None] + self.offset)[None, None]

    def state(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> TileState:
        if key_stop - 1 <= query_start + self.offset:
            return "all"
        return "none" if key_start > query_stop - 1 + self.offset else "some"

    def band(self) -> Band:
        return Band(high=self.offset)


@dataclasses.dataclass(frozen=True)
class Window(Visibility):
    """Key ``k`` is visible to query ``q`` when ``k > q + offset - size``; combine with :class:`Causal`."""

    size: int
    offset: int = 0
    device: torch.device | str = "cpu"

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys > queries[:, None] + (self.offset - self.size))[None, None]

    def state(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> TileState:
        if key_start > query_stop - 1 + self.offset - self.size:
            return "all"
        return "none" if key_stop - 1 <= query_start + self.offset - self.size else "some"

    def band(self) -> Band:
        return Band(low=self.offset - self.size + 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Keys(Visibility):
    """The keys that are tokens and not padding: boolean ``(batch, kv_len)``, the same for every query."""

    valid: Tensor

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        valid = self.valid[:, None, None, key_start:key_stop]
        return valid.expand(-1, 1, query_stop - query_start, -1)

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.valid[:, None, None, keys].expand(-1, 1, len(queries), -1)

    def state(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> TileState:
        valid = self.valid[:, key_start:key_stop]
        return "all" if bool(valid.all()) else "some" if bool(valid.any()) else "none"

    def band(self) -> Band:
        return Band(valid=self.valid)


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Visibility):
    """A mask that the host has already built: boolean ``(batch or 1, heads or 1, q_len, kv_len)``."""

    mask: Tensor

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        return self.mask[:, :, query_start:query_stop, key_start:key_stop]

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.mask[:, :, queries[:, None], keys]


@dataclasses.dataclass(frozen=True, eq=False)
class And(Visibility):
    """Visible under both rules."""

    left: Visibility
    right: Visibility

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        tile = (query_start, query_stop, key_start, key_stop)
        return self.left.block(*tile) & self.right.block(*tile)

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.left.pairs(queries, keys) & self.right.pairs(queries, keys)

    def state(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> TileState:
        states = {rule.state(query_start, query_stop, key_start, key_stop) for rule in (self.left, self.right)}
        return "none" if "none" in states else "some" if "some" in states else "all"

    def unfolded(self) -> Visibility:
        left, right = self.left.unfolded(), self.right.unfolded()
        return self if left is self.left and right is self.right else left & right

    def band(self) -> Band | None:
        left, right = self.left.band(), self.right.band()
        return None if left is None or right is None else left & right
