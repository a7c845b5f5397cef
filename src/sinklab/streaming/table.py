"""Table: which token is where in a bounded cache, and what the forward at hand does; one for all layers of a cache."""

from __future__ import annotations

import abc
import copy
import dataclasses
import weakref
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError
from sinklab.policies.base import SlotPolicy
from sinklab.streaming.traits import Rotation


@dataclasses.dataclass(eq=False)
class Step:
    """One forward of ``length`` new tokens.

    Attributes:
        length: columns of the forward, padding included.
        slot: slot of the one new token: a number where all rows agree, int64 ``(rows,)`` where not; ``None`` in a chunk.
        filled: keys that a layer returns; of a single token the slots that hold a token behind the step, from the first one on.
        shifts: positions by which pinned keys are moved, int64 ``(rows, copies, 1 or pinned)``: in a chunk, one copy of the
            pinned keys for every distance at which a query of it sees them. ``None`` when none is moved.
        visible: boolean ``(rows, 1, length, keys)`` over the keys that a layer returns; ``None`` when all are visible.
        source: for a chunk, ``(rows, slots)``: which new token a slot receives, -1 for none.
        used: for a chunk, slots of the ring that held a token before it, from the first one on.
        position_ids: int64 ``(rows, length)`` for the model.
        matrices: those of :attr:`shifts` by rotation and dtype.
        origin: the same step on the device of the table, where this one is for layers on another.
        which: for a chunk whose sinks are attended to apart, the copy that each query sees, int64 ``(length,)``.
        bias: the visible keys as scores, once they have been asked for.
        at: the step among those of :attr:`shifts`, ``(steps, 1, 1 or pinned)``, where several were planned at once.
    """

    length: int
    slot: int | Tensor | None
    filled: int
    shifts: Tensor | None
    visible: Tensor | None
    source: Tensor | None
    used: int
    position_ids: Tensor
    matrices: dict[tuple[Rotation, torch.dtype], Tensor] = dataclasses.field(default_factory=dict)
    at: int | None = None
    origin: Step | None = None
    which: Tensor | None = None
    bias: Tensor | None = None

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

    def on(self, device: torch.device) -> Step:
        """The same step for layers on another device, those of a model that is spread."""
        names = ("slot", "shifts", "visible", "source", "position_ids")
        moved = copy.copy(self)
        for name in names:
            value = getattr(self, name)
            setattr(moved, name, value.to(device) if isinstance(value, Tensor) else value)
        moved.matrices, moved.at, moved.origin = {}, None, self
        return moved


class StaticStep:
    """One token in every row, where all rows agree, in tensors of fixed shape and place; see :class:`Step`.

    What changes from token to token is a slot, a mask, a position and the rotation of the pinned keys. All are worked out
    before the forward, outside of the graph of a compiled model, and written into the same few tensors.

    Attributes:
        length: 1.
        slots: slots that a layer writes: those of the pinned keys, then that of the new token, int64 ``(pinned + 1,)``.
        visible: boolean ``(1, 1, 1, slots)``; it is given at every step, full or not, so that there is one graph.
        position_ids: int64 ``(1, 1)``.
        seen: columns before the step, int64 ``()``: a number would be part of the graph.
        filled: slots of the cache, all of which a layer returns.
        matrices: for the pinned keys of layers by rotation, ``(pinned, head_dim, head_dim)``, the same tensors at every step.
    """

    length = 1

    def __init__(self, policy: SlotPolicy, rotations: list[Rotation | None], device: torch.device, dtype: torch.dtype) -> None:
        pinned = len(policy.pinned)
        self.filled = policy.num_slots
        self.slots = torch.arange(pinned + 1, device=device)
        self.slot = self.slots[pinned:]
        self.visible = torch.zeros(1, 1, 1, self.filled, dtype=torch.bool, device=device)
        self.position_ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._all_visible = False
        self.seen = torch.zeros((), dtype=torch.long, device=device)
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


PlannedStep: TypeAlias = "Step | StaticStep | OrderedStep"
"""What one forward does."""


class Table(abc.ABC):
    """Tokens are counted row by row, padding left out. As long as no row has had padding all rows agree, and the tables have
    one row for all (``rows`` is 1).

    Args:
        policy: what is held.
        device: of the model; the tables are on the CPU.
        model: it belongs to; kept as a weak reference.

    Attributes:
        step: the forward at hand; ``None`` between forwards.
        seen: tokens of every row, int64 ``(rows,)``.
        base: token of every row that has position 0, int64 ``(rows,)``; see :meth:`rebase`.
        columns: columns fed so far, padding included; what generate() calls the length of the cache.
        padded: columns up to the last one in which a row had padding.
        rebases: how often positions were counted anew.
        highest: largest position of a token before the last time they were.
        index: token in every slot, int64 ``(rows, slots)``, -1 where there is none.
        ids: token id in every slot, int64 ``(batch, slots)``, -1 where embeddings were given; on the device of the model.
    """

    ids: Tensor | None = None
    index: Tensor

    in_order: ClassVar[bool] = False
    """Whether columns are in the order of the text, so that a forward must not make a token leave halfway."""
    per_row: ClassVar[tuple[str, ...]] = ("seen", "base")
    """Tensors with a row for each row of the batch, and below the numbers that are saved with them."""
    numbers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, policy: SlotPolicy, device: torch.device, model: PreTrainedModel | None = None) -> None:
        self.policy, self.device = policy, device
        self._model = None if model is None else weakref.ref(model)
        self.clear()

    def clear(self) -> None:
        """Back to an empty cache."""
        self.step: PlannedStep | None = None
        self.seen = torch.zeros(1, dtype=torch.long)
        self.base = torch.zeros(1, dtype=torch.long)
        self.columns = self.padded = self.rebases = 0
        self.highest = -1

    def finish(self) -> None:
        """The forward at hand is over."""
        self.step = None

    @property
    def model(self) -> PreTrainedModel | None:
        """The model that the cache belongs to; ``None`` when it is gone."""
        return None if self._model is None else self._model()

    @property
    def rows(self) -> int:
        """Rows of the tables: 1 as long as all rows of the batch agree."""
        return len(self.seen)

    @property
    def next_position(self) -> int:
        """Largest position that the next token of a row would have."""
        return int((self.seen - self.base).max())

    @property
    def highest_position(self) -> int | None:
        """Largest position that a token was given so far, -1 before the first; ``None`` where positions are not counted."""
        return max(self.highest, self.next_position - 1)

    @property
    def held(self) -> Tensor:
        """Tokens of every row that are there now, int64 ``(rows,)``."""
        return (self.index >= 0).sum(dim=1)

    @property
    def seq_length(self) -> int | Tensor:
        """Columns before the forward at hand, or so far, as transformers counts them."""
        return self.columns - (0 if self.step is None else self.step.length)

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a layer returns in this step, and the offset by which the last query sees them all."""
        if self.step is None:
            return query_length, 0
        return self.step.filled, 0 if self.in_order else self.columns - self.step.filled

    def misuse(self, length: int) -> str:
        """What went wrong when a layer is given ``length`` keys that no step was planned for."""
        if self.step is not None:
            return f"a layer writes {length} keys where {self.step.length} tokens were given"
        if self.model is None:
            return "the cache belongs to a model that is gone; make one for each model"
        return (
            "the cache was given keys outside of its model's forward; pass it to the "
            f"{type(self.model).__name__} that it belongs to as past_key_values"
        )

    def spread(self, batch: int) -> None:
        """Give every row of the batch its own table, because one of them has padding."""
        if self.rows != batch:
            for name in self.per_row:
                table: Tensor = getattr(self, name)
                setattr(self, name, table.expand(batch, *table.shape[1:]).clone())

    def take(self, rows: Tensor) -> None:
        """Rows of the batch are taken again, left out or reordered."""
        if self.rows > 1:
            for name in self.per_row:
                setattr(self, name, getattr(self, name)[rows.cpu()])
        self.ids = None if self.ids is None else self.ids[rows.to(self.ids.device)]

    def state(self) -> dict[str, Tensor]:
        """The tensors that a saved cache has of it."""
        return {name: getattr(self, name) for name in self.per_row}

    def counts(self) -> dict[str, bool | int]:
        """The numbers that a saved cache has of it."""
        return {name: getattr(self, name) for name in self.numbers}

    def restore(self, state: dict[str, Tensor], counts: dict[str, bool | int]) -> None:
        """Take over what :meth:`state` and :meth:`counts` of another table of this kind gave."""
        for name in self.per_row:
            setattr(self, name, state[name])
        for name in self.numbers:
            setattr(self, name, counts[name])
        self.padded = self.columns if bool((self.seen != self.columns).any()) else 0  # where the padding was is not in the file

    @abc.abstractmethod
    def room(self, length: int, valid: Tensor | None) -> int:
        """How many of ``length`` new columns can be taken at once, at least 1."""

    @abc.abstractmethod
    def plan(self, length: int, valid: Tensor | None) -> PlannedStep:
        """What a forward of ``length`` columns does; ``valid`` is boolean ``(rows, length)`` if some of them are padding.

        The tables are those behind the step when this returns.
        """

    @abc.abstractmethod
    def note(self, ids: Tensor | None, batch: int) -> None:
        """Keep which token ids, ``(batch, length)``, are held behind the step at hand."""

    @abc.abstractmethod
    def rebase(self) -> Tensor:
        """Count positions anew; by how many steps the keys of each row move back, ``(1 or rows,)``."""

    def _count_from(self, oldest: Tensor) -> Tensor:
        """Give position 0 to these tokens, ``(rows,)``; by how many steps keys move back."""
        self.highest = max(self.highest, self.next_position - 1)
        steps, self.base = oldest - self.base, oldest
        self.rebases += 1
        return steps

    def count(self, valid: Tensor) -> None:
        """Count new columns, boolean ``(rows, length)``, true for tokens."""
        hollow = (~valid).any(dim=0).nonzero()
        if len(hollow):
            self.padded = self.columns + int(hollow[-1]) + 1
        self.columns += valid.shape[1]

    def tokens(self, valid: Tensor | None, length: int) -> Tensor:
        """Index of every new token, ``(rows, length)``, -1 for padding."""
        if valid is None:
            return self.seen[:, None] + torch.arange(length)
        return torch.where(valid, self.seen[:, None] + valid.long().cumsum(dim=1) - 1, -1)

    @abc.abstractmethod
    def distances(self, row: int, visible: Tensor) -> tuple[list[int], int]:
        """Distances of all slots' tokens to the next one, which sees ``visible`` ``(slots,)``, and the position of that one."""

    def crop(self, keep: int) -> None:
        """Forget all but the first ``keep`` columns; refused where what is needed then, or padding, is among what goes."""
        if self.rows > 1:
            raise ConfigurationError("a padded batch cannot be cropped: its rows do not agree on their last tokens")
        columns = keep
        if columns:
            if columns < self.padded:
                raise ConfigurationError(
                    f"cannot go back to {columns} columns: there is padding behind them, so which tokens they had is not known"
                )
            keep = int(self.seen) - (self.columns - columns)  # a row alone may have padding in front
        else:
            self.padded = 0
        stays = (self.index >= 0) & (self.index < keep)
        if keep:
            last = torch.tensor(keep - 1)
            there = int((stays & self.policy.visible(last, self.index)).sum())
            needed = int(self.policy.visible(last, torch.arange(keep)).sum())
            if there < needed:
                raise ConfigurationError(
                    f"cannot go back to {keep} tokens: {needed - there} of the {needed} that the policy held then have been "
                    "evicted since. Save the state before, and load it; or make the cache with a `rollback` of as many tokens "
                    "as are taken back at once, with an assistant up to `num_assistant_tokens` of generate()"
                )
        self.index = torch.where(stays, self.index, -1)
        self.seen.fill_(keep)
        self.columns = columns


@dataclasses.dataclass(eq=False)
class OrderedStep:
    """One forward of ``length`` new columns, padding included, behind ``held`` others of an :class:`OrderedTable`.

    Attributes:
        source: which columns of before are held: ``None`` for all, int64 ``(held,)`` alike for all rows, or ``(rows, held)``.
        filled: held and new, the keys that a layer returns.
        attention_mask: 2-D ``(rows, held + length)``, 1 for tokens; ``None`` where there is no padding.
    """

    length: int
    held: int
    source: Tensor | None
    filled: int
    attention_mask: Tensor | None


class OrderedTable(Table):
    """Which token is in which column; no position is counted.

    Columns of a row are in the order of the text and end with its newest token; a row that has fewer tokens than another has
    padding in front, wherever it was in the batch. As long as no row has had padding, the tables have one row for all.

    Attributes:
        index: token in every column, int64 ``(rows, columns held)``, -1 for padding.
        ids: likewise, ``(batch, columns held)``.
    """

    in_order: ClassVar[bool] = True
    per_row: ClassVar[tuple[str, ...]] = ("seen", "index")
    numbers: ClassVar[tuple[str, ...]] = ("columns", "rebases")
    step: OrderedStep | None

    def clear(self) -> None:
        super().clear()
        self.index = torch.zeros(1, 0, dtype=torch.long)

    @property
    def highest_position(self) -> None:
        return None

    @property
    def seq_length(self) -> int:
        return self.columns if self.step is None else self.step.held

    def distances(self, row: int, visible: Tensor) -> tuple[list[int], int]:
        # Columns are counted: those that stay, the next token last.
        return visible.long().flip(0).cumsum(0).flip(0).tolist(), int(visible.sum())

    def room(self, length: int, valid: Tensor | None) -> int:
        """So many that no token leaves on the way, and that all rows end with padding in front only.

        Within a forward the columns of all its queries are the same.
        """
        tokens = self.tokens(valid, length)
        keys = torch.cat((self.index, tokens), dim=1)[:, None]
        queries = tokens[:, :, None]
        visible = self.policy.visible(queries.clamp(min=0), keys.clamp(min=0)) | (keys > queries) | (keys < 0) | (queries < 0)
        inside = (tokens >= 0).long().cumsum(dim=1) + self.seen[:, None] > 0
        fine = (visible.all(dim=2) & ((tokens >= 0) | ~inside)).all(dim=0)
        return max(1, int(fine.long().cumprod(dim=0).sum()))

    def plan(self, length: int, valid: Tensor | None) -> OrderedStep:
        tokens = self.tokens(valid, length)
        newest = tokens.amax(dim=1, keepdim=True).where((tokens >= 0).any(dim=1, keepdim=True), self.seen[:, None] - 1)
        stays = (self.index >= 0) & self.policy.visible(newest.clamp(min=0), self.index.clamp(min=0))
        held = int(stays.sum(dim=1).max()) if stays.numel() else 0
        # Stable: columns that stay keep their order, at the end; in front of them shorter rows get any other column as padding.
        order = stays.long().argsort(dim=1, stable=True)[:, stays.shape[1] - held :]
        held_index = self.index.gather(1, order).where(stays.gather(1, order), -1)
        everything = held == self.index.shape[1] and bool((order == torch.arange(held)).all())
        source = None if everything else (order[0] if self.rows == 1 else order).to(self.device)
        self.index = torch.cat((held_index, tokens), dim=1)
        self.seen = self.seen + (tokens >= 0).sum(dim=1)
        self.count(tokens >= 0)
        there = self.index >= 0
        mask = None if self.rows == 1 and bool(there.all()) else there.long().to(self.device)
        return OrderedStep(length, held, source, held + length, mask)

    def note(self, ids: Tensor | None, batch: int) -> None:
        step = self.step
        assert step is not None
        if ids is None:
            ids = torch.full((batch, step.length), -1)
        if self.ids is not None and step.held:
            before = self.ids if step.source is None else self.ids.gather(1, step.source.expand(batch, -1))
            ids = torch.cat((before, ids), dim=1)
        self.ids = ids

    def rebase(self) -> Tensor:
        return torch.zeros(1, dtype=torch.long)
