"""Step: what one forward does to a cache of slots, the same for all layers: where tokens go, what is turned, who sees what."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.streaming.policy import SlotPolicy
from sinklab.streaming.rotation import Rotation

__all__ = ["Books", "Step"]


@dataclasses.dataclass(eq=False)
class Step:
    """One forward of ``length`` new tokens.

    Attributes:
        length: columns of the forward, padding included.
        slot: slot of the one new token: a number where all rows agree, int64 ``(rows,)`` where not; ``None`` in a chunk.
        filled: slots that hold a token behind the step, from the first one on.
        turns: steps by which pinned keys are moved, int64 ``(rows, copies, 1 or pinned)``: in a chunk, one copy of the pinned
            keys for every distance at which a query of it sees them. ``None`` when none is moved.
        visible: boolean ``(rows, 1, length, keys)`` over the keys that a layer returns; ``None`` when all are visible.
        source: for a chunk, ``(rows, slots)``: which new token a slot receives, -1 for none.
        used: for a chunk, slots of the ring that held a token before it, from the first one on.
        position_ids: int64 ``(rows, length)`` for the model.
        matrices: those of :attr:`turns` by rotation and dtype.
        at: the step among those of :attr:`turns`, ``(steps, 1, 1 or pinned)``, where several were planned at once.
    """

    length: int
    slot: int | Tensor | None
    filled: int
    turns: Tensor | None
    visible: Tensor | None
    source: Tensor | None
    used: int
    position_ids: Tensor
    matrices: dict[tuple[int, torch.dtype], Tensor] = dataclasses.field(default_factory=dict)
    at: int | None = None

    def rotation_matrices(self, rotation: Rotation, dtype: torch.dtype) -> Tensor:
        """Matrices ``(rows, copies, 1 or pinned, head_dim, head_dim)`` for layers that turn like ``rotation``; made once."""
        key = (id(rotation), dtype)
        matrices = self.matrices.get(key)
        if matrices is None:
            assert self.turns is not None
            matrices = self.matrices[key] = rotation.matrices(self.turns, dtype)
        return matrices if self.at is None else matrices[self.at : self.at + 1]


_AHEAD = 32
"""Single tokens that are planned at once: a function of one number costs as much as one of some dozens."""


@dataclasses.dataclass(eq=False)
class _Ahead:
    """Single tokens from ``start`` on in a full cache; good as long as ``base`` and ``anchors`` are those of the books."""

    start: int
    base: Tensor
    anchors: Tensor
    slots: list[int]
    turns: Tensor | None
    turned: list[bool]
    positions: Tensor
    matrices: dict[tuple[int, torch.dtype], Tensor] = dataclasses.field(default_factory=dict)


class Books:
    """Which token is in which slot, how many have been seen, and where positions are counted from.

    Tokens are counted row by row, padding left out. As long as no row has had padding all rows agree, and the tables have one
    row for all (``rows`` is 1).

    Attributes:
        seen: tokens of every row, int64 ``(rows,)``, on the CPU.
        columns: columns fed so far, padding included; what generate() calls the length of the cache.
        base: token of every row that has position 0, int64 ``(rows,)``; see :meth:`rebase`.
        index: token in every slot, int64 ``(rows, slots)``, -1 where there is none; on the CPU.
        anchors: position at which a pinned key was turned when it was written, int64 ``(rows, pinned)``.
        rebases: how often positions were counted anew.
        highest: largest position of a token before the last time they were.
    """

    def __init__(self, policy: SlotPolicy, device: torch.device) -> None:
        self.policy, self.device = policy, device
        self.pinned = torch.tensor(policy.pinned, dtype=torch.long)
        self.in_cache = policy.positions == "in_cache" and bool(policy.pinned)
        self.clear()

    def clear(self) -> None:
        """Back to an empty cache."""
        self.seen = torch.zeros(1, dtype=torch.long)
        self.base = torch.zeros(1, dtype=torch.long)
        self.columns = self.rebases = 0
        self.highest = -1
        self.index = torch.full((1, self.policy.num_slots), -1)
        self.anchors = torch.zeros(1, len(self.policy.pinned), dtype=torch.long)
        self.full = self.turned = False
        self._ahead: _Ahead | None = None

    @property
    def rows(self) -> int:
        """Rows of the tables: 1 as long as all rows of the batch agree."""
        return len(self.seen)

    @property
    def next_position(self) -> int:
        """Largest position that the next token of a row would have."""
        return int((self.seen - self.base).max())

    @property
    def highest_position(self) -> int:
        """Largest position that a token was given so far; -1 before the first."""
        return max(self.highest, self.next_position - 1)

    def spread(self, batch: int) -> None:
        """Give every row of the batch its own table, because one of them has padding."""
        if self.rows != batch:
            tables = (table.expand(batch, *table.shape[1:]).clone() for table in self.tables())
            self.seen, self.base, self.index, self.anchors = tables

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``seen``, ``base``, ``index`` and ``anchors``."""
        return self.seen, self.base, self.index, self.anchors

    def take(self, rows: Tensor) -> None:
        """Rows of the batch are taken again, left out or reordered."""
        if self.rows > 1:
            self.seen, self.base, self.index, self.anchors = (table[rows.cpu()] for table in self.tables())

    # --- the next step ------------------------------------------------------------------------------------------------------

    def turns(self, queries: Tensor) -> Tensor | None:
        """Steps by which pinned keys are moved for queries ``(rows, n)``: ``(rows, n, 1 or pinned)``; ``None`` without any."""
        if not len(self.pinned):
            return None
        original = (self.pinned - self.base[:, None] - self.anchors)[:, None]
        held = self.anchors_known()[:, None]
        moved = original + self.policy.evicted(queries) if self.in_cache else original.expand(*queries.shape, -1)
        moved = moved.where(held, moved.new_zeros(()))
        first = moved[..., :1]
        return first if bool((moved == first).all()) else moved

    def anchors_known(self) -> Tensor:
        """Boolean ``(rows, pinned)``: the pinned tokens that have been written."""
        return self.index[:, : len(self.pinned)] >= 0

    def plan(self, length: int, valid: Tensor | None) -> Step:
        """What a forward of ``length`` columns does; ``valid`` is boolean ``(batch, length)`` if some of them are padding.

        The books are those behind the step when this returns.
        """
        if length == 1 and valid is None and self.rows == 1:
            return self._plan_next() if self.full else self._plan_one()
        if length == 1 and self.rows > 1 and (valid is None or bool(valid.all())):
            return self._plan_rows()
        return self._plan_chunk(length, valid)

    def _plan_next(self) -> Step:
        """One token where every slot is taken and no row is padded: a look at what was worked out ahead."""
        token, ahead = int(self.seen), self._ahead
        if ahead is None or ahead.base is not self.base or ahead.anchors is not self.anchors or token >= ahead.start + _AHEAD:
            ahead = self._ahead = self._look_ahead(token)
        at = token - ahead.start
        self.index[0, ahead.slots[at]] = token
        self.seen += 1
        self.columns += 1
        self.turned |= ahead.turned[at]
        return Step(
            length=1,
            slot=ahead.slots[at],
            filled=self.policy.num_slots,
            turns=ahead.turns if self.turned else None,
            visible=None,
            source=None,
            used=0,
            position_ids=ahead.positions[at : at + 1],
            matrices=ahead.matrices,
            at=at,
        )

    def _look_ahead(self, token: int) -> _Ahead:
        tokens = torch.arange(token, token + _AHEAD)
        turns = self.turns(tokens[None])
        return _Ahead(
            start=token,
            base=self.base,
            anchors=self.anchors,
            slots=self.policy.slots(tokens).tolist(),
            turns=None if turns is None else turns.to(self.device).transpose(0, 1),
            turned=[False] * _AHEAD if turns is None else (turns[0] != 0).any(dim=1).tolist(),
            positions=(tokens - self.base)[:, None].to(self.device),
        )

    def _plan_one(self) -> Step:
        """One token, no row padded, while the cache fills."""
        token = int(self.seen)
        tokens = torch.tensor([[token]])
        slot = int(self.policy.slots(tokens))
        self.index[0, slot] = token
        if slot < len(self.pinned):
            self.anchors[0, slot] = token - int(self.base)
        present = self.index[0] >= 0
        filled, visible = int(present.sum()), None
        self.full = filled == self.policy.num_slots
        if not bool(present[:filled].all()):
            filled = self.policy.num_slots
            visible = present[None, None, None].to(self.device)
        turns = self._turns_of(tokens)
        self.seen += 1
        self.columns += 1
        self._ahead = None
        positions = torch.tensor([[token - int(self.base)]], device=self.device)
        return Step(1, slot, filled, turns, visible, None, 0, positions)

    def _plan_rows(self) -> Step:
        """One token in every row of a batch whose rows do not agree on their tables."""
        tokens = self.seen[:, None]
        slots = self.policy.slots(tokens)
        self.index = self.index.scatter(1, slots, tokens)
        pinned = len(self.pinned)
        self.anchors = torch.where(self.index[:, :pinned] == tokens, tokens - self.base[:, None], self.anchors)
        filled, visible = self.policy.num_slots, None
        if not self.full:
            present = self.index >= 0
            self.full = bool(present.all())
            filled = int(present.any(dim=0).nonzero().max()) + 1
            visible = None if self.full else present[:, None, None, :filled].to(self.device)
        turns = self._turns_of(tokens)
        positions = (tokens - self.base[:, None]).to(self.device)
        self.seen = self.seen + 1
        self.columns += 1
        return Step(1, slots[:, 0].to(self.device), filled, turns, visible, None, 0, positions)

    def _turns_of(self, tokens: Tensor) -> Tensor | None:
        """Turns for queries ``(rows, 1)``; ``None`` as long as no pinned key has ever been moved."""
        turns = self.turns(tokens)
        self.turned |= turns is not None and bool(turns.any())
        return turns.to(self.device) if turns is not None and self.turned else None

    def _plan_chunk(self, length: int, valid: Tensor | None) -> Step:
        if valid is None:
            valid = torch.ones(self.rows, length, dtype=torch.bool)
        ranks = valid.long().cumsum(dim=1)
        tokens = torch.where(valid, self.seen[:, None] + ranks - 1, -1)
        pinned, slots = len(self.pinned), self.policy.num_slots
        before = self.index[:, pinned:]  # pinned keys are given as copies, one for each distance
        used = int(torch.cat(((before >= 0).any(dim=0).nonzero().flatten() + 1, torch.zeros(1, dtype=torch.long))).max())
        before = before[:, :used]
        slot = torch.where(valid, self.policy.slots(tokens.clamp(min=0)), slots)
        column = torch.arange(length).expand_as(slot)
        source = torch.full((self.rows, slots + 1), -1).scatter_reduce_(1, slot, column, "amax")[:, :slots]
        taken = source >= 0
        self.index = torch.where(taken, tokens.gather(1, source.clamp(min=0)), self.index)
        self.anchors = torch.where(taken[:, :pinned], self.pinned - self.base[:, None], self.anchors)
        self.seen = self.seen + ranks[:, -1]
        self.columns += length
        self.full = bool((self.index >= 0).all())

        queries = tokens.clamp(min=0)
        turns, visible = self._copies(queries, tokens)
        self.turned |= turns is not None and bool(turns.any())
        old = self._sees(queries, before) & (before >= 0)[:, None]
        new = self._sees(queries, tokens) & (valid & (slot >= pinned))[:, None]
        # Padding sees itself: what a row without a visible key comes out as depends on the kernel, and may not be a number.
        new |= torch.eye(length, dtype=torch.bool) & ~valid[:, None]
        visible = torch.cat([*visible, old, new], dim=2)[:, None].to(self.device)
        positions = torch.where(valid, queries - self.base[:, None], 0).to(self.device)
        filled = int((self.index >= 0).any(dim=0).sum())
        return Step(length, None, filled, turns, visible, source.to(self.device), used, positions)

    def _sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.policy.visible(queries[:, :, None], keys[:, None])

    def _copies(self, queries: Tensor, tokens: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Turns ``(rows, copies, 1 or pinned)`` of the copies of the pinned keys, and which query sees which of them."""
        turns = self.turns(queries)
        if turns is None:
            return None, []
        length = queries.shape[1]
        if self.rows == 1:
            distinct, which = torch.unique(turns[0], dim=0, return_inverse=True)
            turns = distinct[None]
        else:
            which = torch.arange(length)
        mine = torch.nn.functional.one_hot(which, turns.shape[1]).bool()  # (length, copies)
        held = self.policy.visible(queries[:, :, None], self.pinned) & self.anchors_known()[:, None] & (tokens >= 0)[..., None]
        seen = mine[None, :, :, None] & held[:, :, None]
        return turns.to(self.device), [seen.flatten(2)]

    def crop(self, keep: int) -> None:
        """Forget all but the first ``keep`` tokens.

        Raises:
            ConfigurationError: rows do not agree on their tokens, or some that would be held again have been evicted.
        """
        if self.rows > 1:
            raise ConfigurationError("a padded batch cannot be cropped: its rows do not agree on their last tokens")
        kept = (self.index >= 0) & (self.index < keep)
        if keep:
            kept &= self.policy.visible(torch.tensor(keep - 1), self.index)
            everything = torch.arange(keep)
            needed = int(self.policy.visible(torch.tensor(keep - 1), everything).sum())
            if int(kept.sum()) < needed:
                raise ConfigurationError(
                    f"cannot go back to {keep} tokens: {needed - int(kept.sum())} of the {needed} that the policy held then "
                    "have been evicted since. Save the state before, and load it"
                )
        self.index = torch.where(kept, self.index, -1)
        self.seen.fill_(keep)
        self.columns, self.full = keep, bool(kept.all())

    # --- positions -----------------------------------------------------------------------------------------------------------

    def rebase(self) -> Tensor:
        """Count positions from the oldest token in the ring of each row; by how many steps its keys move back, ``(rows,)``."""
        ring = self.index[:, len(self.pinned) :]
        held = ring.where(ring >= 0, self.seen[:, None]).amin(dim=1)
        oldest = held.where((ring >= 0).any(dim=1), self.base)
        self.highest = self.highest_position
        steps = oldest - self.base
        self.base = oldest
        self.rebases += 1
        return steps
