"""Scored layer: keys, values and scores of one layer, every head with tokens of its own."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.streaming.eviction import Attention, Held, dense, evicting
from sinklab.streaming.held import HeldLayer
from sinklab.streaming.scored_table import ScoredStep, ScoredTable

__all__ = ["ScoredLayer"]


class ScoredLayer(HeldLayer):
    """One layer of a :class:`~sinklab.streaming.scored.ScoredCache`.

    Attributes:
        keys, values: ``(batch, num_kv_heads, slots, head_dim)``; allocated at the first call.
        scores: float32 ``(batch, num_kv_heads, slots)``.
        tokens: index of the token in each slot, int64, likewise; -1 where there is none.
        newer: how many of the tokens held are newer than it, int64, likewise; of no meaning where there is no token.
    """

    buffers: ClassVar[tuple[str, ...]] = ("keys", "values", "scores", "tokens", "newer")
    table: ScoredTable
    scores: Tensor
    tokens: Tensor
    newer: Tensor

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        super().allocate(key_states, value_states)
        self.scores = torch.zeros(self.keys.shape[:3], device=self.device)
        self.tokens = torch.full(self.keys.shape[:3], -1, device=self.device)
        self.newer = torch.zeros_like(self.tokens)
        self.pinned = torch.tensor(self.table.policy.pinned, dtype=torch.long, device=self.device)
        self._given: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the new token of every row, ``(batch, num_kv_heads, 1, head_dim)``; keys and values that are held.

        Of a chunk nothing is written before :meth:`attend`, and keys and values come back as they are.
        """
        self.require(key_states, value_states)
        step = self.table.step
        assert step is not None
        if step.length > 1:
            self._given = key_states, value_states
            self.table.wait_for(self)
            return key_states, value_states
        self._write(step, key_states, value_states)
        if self.table.policy.needs_weights:
            self.table.wait_for(self)
        else:
            self.rescore(None)
        return self._rotated(step.filled), self.values[:, :, : step.filled]

    # --- one token -----------------------------------------------------------------------------------------------------------

    def _write(self, step: ScoredStep, key_states: Tensor, value_states: Tensor) -> None:
        keys, values = self.keys, self.values
        rows = torch.arange(len(keys), device=self.device)
        if step.valid is not None:
            rows = rows[step.valid.expand(len(keys))]
        slot = self._slots(step)[rows]
        at = rows[:, None], torch.arange(keys.shape[1], device=self.device), slot
        keys[at], values[at] = key_states[rows, :, 0], value_states[rows, :, 0]
        self.scores[at] = 0.0
        # Of an empty slot -1 leaves, and no token is older.
        self.newer[rows] += self.tokens[rows] >= self.tokens[at][..., None]
        self.tokens[at] = step.token.expand(len(keys))[rows, None]
        self.newer[at] = 0

    def _rotated(self, filled: int) -> Tensor:
        """The keys that are held, at their positions as the policy has them, ``(batch, num_kv_heads, filled, head_dim)``.

        For in-cache positions a key is moved by the tokens that its head has lost between it and the newest, each time from its
        first form.
        """
        keys, tokens = self.keys[:, :, :filled], self.tokens[:, :, :filled]
        step = self.table.step
        assert step is not None
        if not self.table.in_cache or self.rotation is None:
            return keys
        newest = step.position_ids[:, None]
        steps = newest - self.newer[:, :, :filled] - tokens.clamp(max=self.table.policy.num_slots - 1)
        steps = steps.masked_fill(tokens < 0, 0)
        if not bool(steps.any()):
            return keys
        return self.table.rotations(self.rotation, keys.dtype).rotated(keys, steps).to(keys.dtype)

    def _slots(self, step: ScoredStep) -> Tensor:
        """Slot of the new token, ``(batch, num_kv_heads)``: a free one, or that of the least score, the oldest of equals."""
        scores, tokens = self.scores, self.tokens
        free = step.free[:, None].expand(len(tokens), tokens.shape[1])
        if int(step.free.min()) == int(step.free.max()) < tokens.shape[2]:
            return free
        recent = tokens > (step.token - self.table.policy.protected)[:, None, None]
        stays = recent | torch.isin(tokens, self.pinned) | (tokens < 0)
        ranked = scores.masked_fill(stays, torch.inf)
        least = (ranked == ranked.amin(dim=2, keepdim=True)) & ~stays
        oldest = tokens.masked_fill(~least, torch.iinfo(torch.long).max).argmin(dim=2)
        return torch.where(free < tokens.shape[2], free, oldest)

    def rescore(self, weights: Tensor | None) -> None:
        """Take in what was computed for the newest token; ``weights`` are ``(batch, num_kv_heads, filled)``, if needed."""
        step = self.table.step
        assert step is not None
        buffers = (self.keys, self.values, self.scores, self.tokens)
        keys, values, scores, tokens = (buffer[:, :, : step.filled] for buffer in buffers)
        new = self.table.policy.score(scores, keys, values, weights).to(torch.float32)
        counts = tokens >= 0 if step.valid is None else (tokens >= 0) & step.valid[:, None, None]
        scores.copy_(torch.where(counts, new, scores))

    # --- a chunk -------------------------------------------------------------------------------------------------------------

    def attend(self, attention: Attention) -> Tensor:
        """Head outputs of the chunk at hand, ``(batch, length, num_heads, value_dim)``; its tokens are then written."""
        step, policy, given = self.table.step, self.table.policy, self._given
        assert step is not None
        assert given is not None
        self._given = None
        keys, values = given
        tokens = step.token[:, None] + torch.arange(step.length, device=self.device)
        nothing = torch.zeros(keys.shape[:3], device=self.device)
        scores = policy.score(nothing, keys, values, nothing if policy.needs_weights else None)
        new = Held(keys, values, scores.to(torch.float32), tokens[:, None].expand(keys.shape[:3]))
        if step.fills:
            outputs, held = dense(policy, attention, self._held(int(step.free[0])), new)
        else:
            table = None
            if self.table.in_cache and self.rotation is not None:
                table = self.table.rotations(self.rotation, keys.dtype)
            held = self._held(policy.num_slots).taken(self.tokens.argsort(dim=2))
            outputs, held = evicting(policy, attention, held, new, table)
        for name in ("keys", "values", "scores", "tokens"):
            tensor = getattr(held, name)
            getattr(self, name)[:, :, : tensor.shape[2]] = tensor
        count = held.tokens.shape[2]
        self.newer[:, :, :count] = torch.arange(count - 1, -1, -1, device=self.device)
        return outputs

    def _held(self, slots: int) -> Held:
        return Held(*(buffer[:, :, :slots] for buffer in (self.keys, self.values, self.scores, self.tokens)))

    def reset(self) -> None:
        """Nothing is held any more."""
        if self.is_initialized:
            self.tokens.fill_(-1)
