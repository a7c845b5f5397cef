"""Step: what one forward writes into a bounded cache, moves and sees; worked out by the table, read by every layer."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor

from sinklab.policies.base import SlotPolicy
from sinklab.streaming.traits import Rotation


@dataclasses.dataclass(eq=False)
class Step:
    """One forward of ``length`` new columns, padding included."""

    length: int
    slot: int | Tensor | None  # of the one new token: one for all rows, or int64 (rows,); None in a chunk
    filled: int  # keys that a layer returns; of a single token the slots from the first one on that hold a token behind it
    # Positions by which pinned keys are moved, int64 (rows, copies, 1 or pinned): in a chunk, one copy of the pinned keys for
    # every distance at which a query of it sees them. None when none is moved.
    shifts: Tensor | None
    visible: Tensor | None  # boolean (rows, 1, length, keys) over the keys that a layer returns; None when all are
    source: Tensor | None  # of a chunk, (rows, slots): which new token a slot receives, -1 for none
    used: int  # of a chunk: slots of the ring, from the first one on, that held a token before it
    position_ids: Tensor  # int64 (rows, length), for the model
    matrices: dict[tuple[Rotation, torch.dtype], Tensor] = dataclasses.field(default_factory=dict)  # of the shifts
    at: int | None = None  # the step among those of the shifts, (steps, 1, 1 or pinned), where several were planned at once
    origin: Step | None = None  # the same on the device of the table, where this one is for layers on another
    which: Tensor | None = None  # of a chunk whose sinks are attended to apart: the copy that each query sees, int64 (length,)
    received: Tensor | None = None  # of a chunk in which all rows agree: the slots that receive a token
    bias: Tensor | None = None  # the visible keys as scores, once they have been asked for
    turns: dict[tuple[Rotation, torch.dtype], tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)

    def rotation_matrices(self, rotation: Rotation, dtype: torch.dtype) -> Tensor:
        """Matrices ``(rows, copies, 1 or pinned, head_dim, head_dim)`` for layers that rotate like ``rotation``; made once."""
        key = (rotation, dtype)
        matrices = self.matrices.get(key)
        if matrices is None:
            assert self.shifts is not None
            if self.origin is not None:
                matrices = self.matrices[key] = self.origin.rotation_matrices(rotation, dtype).to(self.shifts.device)
                return matrices
            matrices = self.matrices[key] = rotation.matrices(self.shifts, dtype)
        return matrices if self.at is None else matrices[self.at : self.at + 1]

    def waves(self, rotation: Rotation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same for copies that are moved coordinate by coordinate, ``(rows, 1, copies, 1 or pinned, head_dim)`` each."""
        if (rotation, dtype) not in self.turns:
            assert self.shifts is not None
            shifts = self.shifts if self.at is None else self.shifts[self.at : self.at + 1]
            self.turns[rotation, dtype] = rotation.waves(shifts[:, None], dtype)
        return self.turns[rotation, dtype]

    def on(self, device: torch.device) -> Step:
        """The same step for layers on another device, those of a model that is spread."""
        names = ("slot", "shifts", "visible", "source", "received", "position_ids")
        moved = copy.copy(self)
        for name in names:
            value = getattr(self, name)
            setattr(moved, name, value.to(device) if isinstance(value, Tensor) else value)
        if self.at is not None and moved.shifts is not None:
            moved.shifts = moved.shifts[self.at : self.at + 1]
        moved.matrices, moved.turns, moved.at, moved.origin = {}, {}, None, self
        return moved


class StaticStep:
    """One token in every row, where all rows agree, in tensors of fixed shape and place; see :class:`Step`.

    What changes from token to token is a slot, a mask, a position and the rotation of the pinned keys. All are worked out
    before the forward, outside of the graph of a compiled model, and written into the same few tensors.

    Slots are those of the pinned keys, then that of the new token, int64 ``(pinned + 1,)``; a layer returns all of the cache.
    """

    length = 1

    def __init__(self, policy: SlotPolicy, rotations: list[Rotation | None], device: torch.device, dtype: torch.dtype) -> None:
        pinned = len(policy.pinned)
        self.filled = policy.num_slots
        self.slots = torch.arange(pinned + 1, device=device)
        self.slot = self.slots[pinned:]
        self.visible = torch.zeros(1, 1, 1, self.filled, dtype=torch.bool, device=device)  # given full or not: one graph
        self.position_ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._all_visible = False
        self.seen = torch.zeros((), dtype=torch.long, device=device)  # columns before the step; a number would be in the graph
        self.matrices = {
            rotation: torch.empty(pinned, rotation.head_dim, rotation.head_dim, device=device, dtype=dtype)
            for rotation in rotations
            if rotation is not None
        }

    def set(self, step: Step, slot: int, present: Tensor, seen: int) -> None:
        """Become ``step``, which writes ``slot``; ``present`` is boolean ``(slots,)``, those that hold a token behind it."""
        self.seen.fill_(seen)
        self.slot.fill_(slot)
        every = bool(present.all())
        if not (every and self._all_visible):  # a copy to another device waits for it, and a full cache stays full
            self.visible.copy_(present)
        self._all_visible = every
        self.position_ids.copy_(step.position_ids)
        for rotation, matrices in self.matrices.items():
            if step.shifts is None:
                matrices.copy_(torch.eye(rotation.head_dim, device=matrices.device))
            else:
                matrices.copy_(step.rotation_matrices(rotation, matrices.dtype)[0, 0])
