"""Table: which token is where in a bounded cache, and what the forward at hand does; one for all layers of a cache."""

from __future__ import annotations

import abc
import weakref
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError
from sinklab.policies.base import BoundedPolicy, SlotPolicy

__all__ = ["IndexedTable", "PlannedStep", "Table"]


class PlannedStep(Protocol):
    """What one forward does."""

    @property
    def length(self) -> int:
        """Columns of the forward, padding included."""

    @property
    def filled(self) -> int:
        """Keys that a layer returns in this forward."""


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
    """

    in_order: ClassVar[bool] = False
    """Whether columns are in the order of the text, so that a forward must not make a token leave halfway."""
    counts_room: ClassVar[bool] = False
    """Whether :meth:`room` has something to say."""
    per_row: ClassVar[tuple[str, ...]] = ("seen", "base")
    """Tensors with a row for each row of the batch, and below the numbers that are saved with them."""
    numbers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, policy: BoundedPolicy, device: torch.device, model: PreTrainedModel | None = None) -> None:
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
        return self.seen.clamp(max=self.policy.num_slots)

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

    def room(self, length: int, valid: Tensor | None) -> int:
        """How many of ``length`` new columns can be taken at once, at least 1."""
        return length

    @abc.abstractmethod
    def plan(self, length: int, valid: Tensor | None) -> PlannedStep:
        """What a forward of ``length`` columns does; ``valid`` is boolean ``(rows, length)`` if some of them are padding.

        The tables are those behind the step when this returns.
        """

    def note(self, ids: Tensor | None, batch: int) -> None:  # noqa: B027
        """Keep which token ids, ``(batch, length)``, are held behind the step at hand; nothing by default."""

    @abc.abstractmethod
    def rebase(self) -> Tensor:
        """Count positions anew; by how many steps the keys of each row move back, ``(1 or rows,)``."""

    def _count_from(self, oldest: Tensor) -> Tensor:
        """Give position 0 to these tokens, ``(rows,)``; by how many steps keys move back."""
        self.highest = max(self.highest, self.next_position - 1)
        steps, self.base = oldest - self.base, oldest
        self.rebases += 1
        return steps

    @abc.abstractmethod
    def crop(self, keep: int) -> None:
        """Forget all but the first ``keep`` columns.

        Raises:
            ConfigurationError: rows do not agree on their tokens, there is padding among those that go, or some that would be
                held again have been evicted.
        """


class IndexedTable(Table):
    """The table of a slot policy, which knows the token of every slot.

    Attributes:
        index: token in every slot, int64 ``(rows, slots)``, -1 where there is none.
        ids: token id in every slot, int64 ``(batch, slots)``, -1 where embeddings were given; on the device of the model.
    """

    policy: SlotPolicy
    ids: Tensor | None = None
    index: Tensor

    @property
    def held(self) -> Tensor:
        return (self.index >= 0).sum(dim=1)

    def take(self, rows: Tensor) -> None:
        super().take(rows)
        self.ids = None if self.ids is None else self.ids[rows.to(self.ids.device)]

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
        """Distance of every slot's token to the next token as the scores have it, and the position of that one.

        Args:
            visible: boolean ``(slots,)``, the slots that the next token sees.
        """

    def crop(self, keep: int) -> None:
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
