"""Scored table: how many tokens each row of a cache of scores has seen, and what the forward at hand does."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.policies.base import ScoredPolicy
from sinklab.streaming.attending import AwaitingTable
from sinklab.streaming.eviction import AT_ONCE, Attention
from sinklab.streaming.rotation import Rotation
from sinklab.streaming.rotation_table import RotationTable

__all__ = ["ScoredStep", "ScoredTable", "Waiting"]


class Waiting(Protocol):
    """A layer that has written keys, and whose attention comes next; the second axis of ``tokens`` is that of its heads."""

    tokens: Tensor

    def rescore(self, weights: Tensor | None) -> None:
        """Take in the weights of the newest token, ``(batch, num_kv_heads, filled)``."""

    def attend(self, attention: Attention) -> Tensor:
        """Head outputs of a chunk, ``(batch, length, num_heads, value_dim)``."""


@dataclasses.dataclass(eq=False)
class ScoredStep:
    """One forward: of one token a row, or of a chunk without padding, whose rows have all the same number of slots free.

    Attributes:
        length: tokens of a row; there is room for all or for none.
        token: index of the first new token, int64 ``(rows,)``; of padding any.
        valid: boolean ``(rows,)``, or ``None`` if no row has padding.
        free: first slot of each row that has never held a token, int64 ``(rows,)``; ``num_slots`` where the row is full.
        fills: whether no token leaves.
        filled: keys that a layer returns: of one token the slots that hold a token of some row behind the step, from the first
            one on; of a chunk those of the chunk, since attention is computed here.
        visible: boolean ``(rows, 1, length, filled)``; ``None`` when all are visible.
        position_ids: int64 ``(rows, length)``.
    """

    length: int
    token: Tensor
    valid: Tensor | None
    free: Tensor
    fills: bool
    filled: int
    visible: Tensor | None
    position_ids: Tensor


class ScoredTable(AwaitingTable):
    """Which tokens are held is each layer's to say, and each head's.

    With in-cache positions a query is at its rank among the tokens that are held, which is that of the last slot as soon as the
    cache is full; so positions have an end and are never counted anew.
    """

    counts_room: ClassVar[bool] = True
    without: ClassVar[str] = (
        "has no weights to go by: it computes attention in its own code, or an attend() on this model is open and sees it first"
    )
    policy: ScoredPolicy
    step: ScoredStep | None
    waiting: Waiting | None = None

    @property
    def in_cache(self) -> bool:
        """Whether positions are those in the cache."""
        return self.policy.positions == "in_cache"

    def positions(self, tokens: Tensor) -> Tensor:
        """Position of each token when it is the newest; int64, of the same shape as ``tokens``, whose rows are those here."""
        return tokens.clamp(max=self.policy.num_slots - 1) if self.in_cache else tokens - self.base[:, None]

    @property
    def next_position(self) -> int:
        return min(int(self.seen.max()), self.policy.num_slots) if self.in_cache else super().next_position

    def room(self, length: int, valid: Tensor | None) -> int:
        held = self.held
        if int(held.min()) < int(held.max()):
            return 1
        if valid is not None:
            length = max(1, int(valid.all(dim=0).long().cumprod(dim=0).sum()))
        free = self.policy.num_slots - int(held[0])
        return min(length, free) if free else length

    def plan(self, length: int, valid: Tensor | None) -> ScoredStep:
        token, free = self.seen, self.held
        positions = self.positions(token[:, None] + torch.arange(length)).to(self.device)
        fills = bool((free < self.policy.num_slots).all())
        self.seen = token + (length if valid is None else valid.sum(dim=1))
        self.columns += length
        if length > 1:
            visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device).expand(self.rows, 1, length, length)
            return ScoredStep(length, token.to(self.device), None, free.to(self.device), fills, length, visible, positions)
        held = self.held
        filled = max(1, int(held.max()))
        # Padding before the first token of a row sees a slot of zeros: a row that sees nothing may not be a number.
        there = (torch.arange(filled) < held.clamp(min=1)[:, None])[:, None, None].to(self.device)
        valid = None if valid is None else valid[:, 0].to(self.device)
        shown = None if bool((held == filled).all()) else there
        return ScoredStep(1, token.to(self.device), valid, free.to(self.device), fills, filled, shown, positions)

    def clear(self) -> None:
        super().clear()
        self._rotations: dict[tuple[Rotation, torch.dtype], RotationTable] = {}

    def rotations(self, rotation: Rotation, dtype: torch.dtype) -> RotationTable:
        """All steps by which keys of that rotation may be moved; one table for all layers that rotate alike."""
        key = (rotation, torch.promote_types(dtype, torch.float32))
        if key not in self._rotations:
            with torch.inference_mode(False):
                self._rotations[key] = RotationTable(rotation, self.policy.num_slots + AT_ONCE, key[1], self.device)
        return self._rotations[key]

    def rebase(self) -> Tensor:
        """Count positions from the next token; in-cache positions stay."""
        if self.in_cache:
            return torch.zeros(1, dtype=torch.long)
        return self._count_from(self.seen.min().expand(self.rows))

    def crop(self, keep: int) -> None:
        raise ConfigurationError(
            f"cannot go back to {keep} tokens: scores of policy {self.policy.name!r} have the tokens since then in them. Save "
            "the state before, and load it"
        )
