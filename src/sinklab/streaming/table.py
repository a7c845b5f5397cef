"""Table: which token is in which slot of a bounded cache; it plans what each forward writes, moves and sees."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.anatomy import HYBRID, RECURRENT_KINDS
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.policies.base import SlotPolicy
from sinklab.results.environment import require_memory
from sinklab.streaming.step import StaticStep, Step
from sinklab.streaming.traits import Rotation

COPIES = 2**15
"""Copies of pinned keys that a chunk has at most, unless it is a token: each query sees them at a distance of its own.

They are as many as the pinned tokens times the distances, so a long text that is kept would otherwise be held hundreds of times
in each layer, and every query would compute scores with all of that.
"""

_AHEAD = 32
"""Single tokens that are planned at once: a function of one number costs as much as one of some dozens."""


class SlotTable:
    """Each token is in the slot that the policy gives it, pinned ones first; one table, on the CPU, for all layers of a cache.

    Tokens are counted row by row, padding left out. As long as no row has had padding all rows agree, and the tables have one
    row for all (``rows`` is 1).

    Attributes:
        seen, base: tokens of every row, and the one that has position 0 (see :meth:`rebase`), int64 ``(rows,)``.
        columns: columns fed so far, padding included; what generate() calls the length of the cache.
        padded: columns up to the last one in which a row had padding.
        highest: largest position of a token before the last time that positions were counted anew.
        index: token in every slot, int64 ``(rows, slots)``, -1 where there is none.
        anchors: position with which a pinned key was rotated when it was written, int64 ``(rows, pinned)``.
        full, shifted: whether every slot of every row is taken, and whether a pinned key has ever been moved.
    """

    per_row: ClassVar[tuple[str, ...]] = ("seen", "base", "index", "anchors")
    """Tensors with a row for each row of the batch, and below the numbers that are saved with them."""
    numbers: ClassVar[tuple[str, ...]] = ("columns", "rebases", "full", "shifted", "highest")
    step: Step | StaticStep | None  # the forward at hand
    ids: Tensor | None = None  # int64 (batch, slots), -1 where embeddings were given; on the device of the model
    apart: bool = False  # whether the sinks of the next chunk are attended to beside its other keys (streaming/host.py)
    left: tuple[Tensor, Tensor] | None = None  # keys and values of the sinks of the layer whose attention comes next
    watched: bool = False  # whether it is looked at whether attention gets what the layers return
    given: tuple[Tensor, Tensor] | None = None  # what the last layer has returned, as long as that is looked at

    def __init__(self, policy: SlotPolicy, device: torch.device, model: PreTrainedModel | None = None) -> None:
        self.policy, self.device = policy, device
        self.pinned = torch.tensor(policy.pinned, dtype=torch.long)
        self.in_cache = policy.positions == "in_cache" and bool(policy.pinned)
        self._model = None if model is None else weakref.ref(model)
        self.clear()

    def clear(self) -> None:
        """Back to an empty cache."""
        self.step = None
        self.seen = torch.zeros(1, dtype=torch.long)
        self.base = torch.zeros(1, dtype=torch.long)
        self.columns = self.padded = self.rebases = 0
        self.highest = -1
        require_memory(8 * self.policy.num_slots, f"policy {self.policy.name!r} with {self.policy.num_slots} tokens to hold")
        self.index = torch.full((1, self.policy.num_slots), -1)
        self.anchors = torch.zeros(1, len(self.pinned), dtype=torch.long)
        self.full = self.shifted = False
        self._elsewhere: tuple[Step, dict[torch.device, Step]] | None = None
        self._ahead: tuple[int, Tensor, Tensor, list[tuple[Step, int]]] = (0, self.base, self.anchors, [])

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
    def highest_position(self) -> int:
        """Largest position that a token was given so far, -1 before the first."""
        return max(self.highest, self.next_position - 1)

    @property
    def held(self) -> Tensor:
        """Tokens of every row that are there now, int64 ``(rows,)``."""
        return (self.index >= 0).sum(dim=1)

    @property
    def seq_length(self) -> int | Tensor:
        """Columns before the forward at hand, or so far, as transformers counts them."""
        if isinstance(self.step, StaticStep):
            return self.step.seen
        return self.columns - (0 if self.step is None else self.step.length)

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a layer returns in this step, and the offset by which the last query sees them all."""
        return (query_length, 0) if self.step is None else (self.step.filled, self.columns - self.step.filled)

    def misuse(self, length: int) -> str:
        """What went wrong when a layer is given ``length`` keys that no step was planned for."""
        if self.step is not None:
            return f"a layer writes {length} keys where {self.step.length} tokens were given"
        if self.model is None:
            return "the cache belongs to a model that is gone; make one for each model"
        return (
            "the cache was given keys outside of its model's forward; pass it to the "
            f"{type(self.model).__name__} that it belongs to, as `cache`"
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

    # --- saved --------------------------------------------------------------------------------------------------------------

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

    # --- the next step ------------------------------------------------------------------------------------------------------

    def tokens(self, valid: Tensor | None, length: int) -> Tensor:
        """Index of every new token, ``(rows, length)``, -1 for padding."""
        if valid is None:
            return self.seen[:, None] + torch.arange(length)
        return torch.where(valid, self.seen[:, None] + valid.long().cumsum(dim=1) - 1, -1)

    def shifts(self, queries: Tensor) -> Tensor | None:
        """Steps by which pinned keys are moved for queries ``(rows, n)``: ``(rows, n, 1 or pinned)``; ``None`` without any."""
        if not len(self.pinned):
            return None
        moved = self.moved(queries)
        first = moved[..., :1]
        return first if bool((moved == first).all()) else moved

    def moved(self, queries: Tensor) -> Tensor:
        """The same for each pinned key, ``(rows, n, pinned)``."""
        original = (self.pinned - self.base[:, None] - self.anchors)[:, None]
        moved = original + self.policy.evicted(queries) if self.in_cache else original.expand(*queries.shape, -1)
        return moved.where(self._written()[:, None], 0)

    def _written(self) -> Tensor:
        """Boolean ``(rows, pinned)``: the pinned tokens that have been written."""
        return self.index[:, : len(self.pinned)] >= 0

    def step_at(self, device: torch.device) -> Step | StaticStep | None:
        """The step at hand for a layer on a device: those of a model that is spread are on several."""
        step = self.step
        if device == self.device or not isinstance(step, Step):
            return step
        if self._elsewhere is None or self._elsewhere[0] is not step:
            self._elsewhere = step, {}
        moved = self._elsewhere[1]
        if device not in moved:
            moved[device] = step.on(device)
        return moved[device]

    def room(self, length: int, valid: Tensor | None) -> int:
        """How many of ``length`` new columns can be taken at once: their copies of pinned keys are :data:`COPIES` at most."""
        most = max(1, COPIES // max(1, len(self.pinned)))
        if not self.in_cache or length <= most:
            return length
        if self.rows > 1:  # a copy for each column
            return most
        evicted = self.policy.evicted(self.tokens(valid, length)[0].clamp(min=0))
        copies = (evicted[1:] != evicted[:-1]).any(dim=1).cumsum(dim=0) + 1
        return 1 + int((copies <= most).sum())

    def plan(self, length: int, valid: Tensor | None) -> Step:
        """What a forward of ``length`` columns does; ``valid`` is boolean ``(rows, length)`` if some of them are padding.

        The tables are those behind the step when this returns.
        """
        if length > 1 or (valid is not None and not bool(valid.all())):
            return self._plan_chunk(length, valid)
        ahead = self.full and self.rows == 1 and not self.policy.holds_more
        return self._plan_next() if ahead else self._plan_token()

    def _plan_next(self) -> Step:
        """One token where every slot is taken and no row is padded: a look at what was worked out ahead."""
        token = int(self.seen)
        start, base, anchors, steps = self._ahead
        if base is not self.base or anchors is not self.anchors or not 0 <= token - start < len(steps):
            start, *_, steps = self._ahead = token, self.base, self.anchors, self._look_ahead(token)
        step, slot = steps[token - start]
        self.index[0, slot] = token
        self.seen += 1
        self.columns += 1
        self.shifted |= step.shifts is not None
        return step

    def _look_ahead(self, token: int) -> list[tuple[Step, int]]:
        """Steps and slots of the tokens from this one on, good as long as ``base`` and ``anchors`` are."""
        tokens = torch.arange(token, token + _AHEAD)
        shifts, first, slots = self.shifts(tokens[None]), _AHEAD, self.policy.num_slots
        if shifts is not None:  # from the first one on that moves a pinned key
            first = 0 if self.shifted else int((shifts[0] != 0).any(dim=1).logical_not().cumprod(dim=0).sum())
            shifts = shifts.to(self.device).transpose(0, 1)
        positions = (tokens - self.base)[:, None].to(self.device)
        matrices: dict[tuple[Rotation, torch.dtype], Tensor] = {}
        return [
            (Step(1, slot, slots, shifts if at >= first else None, None, None, 0, positions[at : at + 1], matrices, at), slot)
            for at, slot in enumerate(self.policy.slots(tokens).tolist())
        ]

    def write(self) -> tuple[Tensor, Tensor]:
        """Put the next token of every row into its slot; token and slot, ``(rows, 1)`` each. In operations on tensors alone."""
        tokens = self.seen[:, None]
        slots = self.policy.slots(tokens)
        self.index = self.index.scatter(1, slots, tokens)
        written = self.index[:, : len(self.pinned)] == tokens
        self.anchors = torch.where(written, tokens - self.base[:, None], self.anchors)
        return tokens, slots

    def present(self, tokens: Tensor) -> Tensor:
        """Which slots ``(rows, slots)`` hold a token that these, ``(rows, 1)``, see."""
        present = self.index >= 0
        return present & self.policy.visible(tokens, self.index) if self.policy.holds_more else present

    def _plan_token(self) -> Step:
        """One token in every row while the cache fills, or where rows do not agree on their tables."""
        tokens, slots = self.write()
        filled, visible = self.policy.num_slots, None
        if not self.full or self.policy.holds_more:
            present = self.index >= 0
            self.full = bool(present.all())
            filled = int(present.any(dim=0).nonzero().max()) + 1
            present = self.present(tokens)[:, None, None, :filled]
            visible = None if bool(present.all()) else present.to(self.device)
        shifts = self.shifts(tokens)
        self.shifted |= shifts is not None and bool(shifts.any())  # as long as no pinned key has ever been moved there are none
        shifts = shifts.to(self.device) if shifts is not None and self.shifted else None
        positions = (tokens - self.base[:, None]).to(self.device)
        self.seen = self.seen + 1
        self.columns += 1
        slot = int(slots) if self.rows == 1 else slots[:, 0].to(self.device)
        return Step(1, slot, filled, shifts, visible, None, 0, positions)

    def _plan_chunk(self, length: int, valid: Tensor | None) -> Step:
        tokens = self.tokens(valid, length)
        valid = tokens >= 0
        pinned, slots = len(self.pinned), self.policy.num_slots
        before = self.index[:, pinned:]  # pinned keys are given as copies, one for each distance
        used = int(((before >= 0).any(dim=0) * torch.arange(1, before.shape[1] + 1)).max())
        before = before[:, :used]
        slot = torch.where(valid, self.policy.slots(tokens.clamp(min=0)), slots)
        column = torch.arange(length).expand_as(slot)
        source = torch.full((self.rows, slots + 1), -1).scatter_reduce_(1, slot, column, "amax")[:, :slots]
        taken = source >= 0
        self.index = torch.where(taken, tokens.gather(1, source.clamp(min=0)), self.index)
        self.anchors = torch.where(taken[:, :pinned], self.pinned - self.base[:, None], self.anchors)
        self.seen = self.seen + valid.sum(dim=1)
        hollow = (~valid).any(dim=0).nonzero()
        if len(hollow):
            self.padded = self.columns + int(hollow[-1]) + 1
        self.columns += length
        self.full = bool((self.index >= 0).all())

        queries = tokens.clamp(min=0)
        shifts, copies, which = self._copies(queries, tokens)
        self.shifted |= shifts is not None and bool(shifts.any())
        old = self.policy.visible(queries[:, :, None], before[:, None]) & (before >= 0)[:, None]
        new = self.policy.visible(queries[:, :, None], tokens[:, None]) & (valid & (slot >= pinned))[:, None]
        # Padding sees itself: what a row without a visible key comes out as depends on the kernel, and may not be a number.
        new |= torch.eye(length, dtype=torch.bool) & ~valid[:, None]
        apart = self.apart and shifts is not None
        visible = torch.cat([*([] if apart else copies), old, new], dim=2)[:, None].to(self.device)
        positions = torch.where(valid, queries - self.base[:, None], 0).to(self.device)
        step = Step(length, None, visible.shape[-1], shifts, visible, source.to(self.device), used, positions)
        step.which = which.to(self.device) if apart else None
        step.received = taken[0].nonzero()[:, 0].to(self.device) if self.rows == 1 else None
        return step

    def _copies(self, queries: Tensor, tokens: Tensor) -> tuple[Tensor | None, list[Tensor], Tensor]:
        """Shifts ``(rows, copies, 1 or pinned)`` of the copies of the pinned keys; what of them each query sees, and which."""
        shifts = self.shifts(queries)
        which = torch.arange(queries.shape[1])
        if shifts is None:
            return None, [], which
        if self.rows == 1:
            distinct, which = torch.unique(shifts[0], dim=0, return_inverse=True)
            shifts = distinct[None]
        mine = torch.nn.functional.one_hot(which, shifts.shape[1]).bool()  # (length, copies)
        held = self.policy.visible(queries[:, :, None], self.pinned) & self._written()[:, None] & (tokens >= 0)[..., None]
        seen = mine[None, :, :, None] & held[:, :, None]
        return shifts.to(self.device), [seen.flatten(2)], which

    def leave(self, keys: Tensor, values: Tensor) -> None:
        """Leave the sinks of a layer to the attention call that comes next, which must have taken those of the layer before."""
        self.require_taken()
        self.left = keys, values

    def require_taken(self) -> None:
        """Refuse to go on where attention was computed without the sinks."""
        if self.left is not None:
            raise UnsupportedModelError(
                f"a layer of {type(self.model).__name__} computed attention where it could not be seen, without its sinks; "
                "make the cache with chunk=1"
            )

    def note(self, ids: Tensor | None, batch: int) -> None:
        """Keep which token ids, ``(batch, length)``, are held behind the step at hand."""
        step, table = self.step, self.ids
        assert isinstance(step, Step)
        if ids is None:
            ids = torch.full((batch, step.length), -1, device=self.device)
        if table is None or len(table) != batch:
            with torch.inference_mode(False):  # as of the layers' buffers
                table = self.ids = torch.full((batch, self.policy.num_slots), -1, device=ids.device)
        if step.source is not None:
            source = step.source.expand(batch, -1)
            table.copy_(torch.where(source >= 0, ids.gather(1, source.clamp(min=0)), table))
        elif isinstance(step.slot, Tensor):
            table[torch.arange(batch, device=table.device), step.slot] = ids[:, 0]
        else:
            table[:, step.slot] = ids[:, 0]

    def distances(self, row: int) -> tuple[list[int], int]:
        """Distances of all slots' tokens to the next one, and the position of that one."""
        query = self.seen[row]
        distances = query - self.index[row]
        if self.in_cache:
            distances[: len(self.pinned)] -= self.policy.evicted(query)
        return distances.tolist(), int(query - self.base[row])

    # --- back, and anew -----------------------------------------------------------------------------------------------------

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

        self.full = bool((self.index >= 0).all())
        if int(self.seen) < int(self.base):  # none but pinned tokens are left, whose keys move as positions do
            self.base = torch.zeros_like(self.base)

    def oldest(self) -> Tensor:
        """The oldest token in the ring of each row, ``(rows,)``; the one with position 0 where there is none."""
        ring = self.index[:, len(self.pinned) :]
        return ring.where(ring >= 0, self.seen[:, None]).amin(dim=1).where((ring >= 0).any(dim=1), self.base)

    def rebase(self) -> Tensor:
        """Count positions from the oldest token in the ring of each row; by how many steps keys move back, ``(1 or rows,)``."""
        self.highest = max(self.highest, self.next_position - 1)
        oldest = self.oldest()
        steps, self.base = oldest - self.base, oldest
        self.rebases += 1
        return steps


_NARROW = "narrow."
"""What the names of the narrow table begin with in a saved state."""


class WindowedTable(SlotTable):
    """The table of the layers that a policy bounds, which takes along ``narrow``, that of the narrow layers."""

    def __init__(self, policy: SlotPolicy, window: SlotPolicy, device: torch.device, model: PreTrainedModel) -> None:
        self.narrow = SlotTable(window, device, model)
        super().__init__(policy, device, model)

    def clear(self) -> None:
        super().clear()
        self.narrow.clear()

    def finish(self) -> None:
        super().finish()
        self.narrow.finish()

    def spread(self, batch: int) -> None:
        super().spread(batch)
        self.narrow.spread(batch)

    def take(self, rows: Tensor) -> None:
        super().take(rows)
        self.narrow.take(rows)

    def plan(self, length: int, valid: Tensor | None) -> Step:
        self.narrow.step = self.narrow.plan(length, valid)
        return super().plan(length, valid)

    def rebase(self) -> Tensor:
        """Count positions from the oldest token in the ring of the policy, in all layers."""
        steps = super().rebase()
        self.narrow.base = self.base.clone()
        return steps

    def crop(self, keep: int) -> None:
        copy.deepcopy(self.narrow).crop(keep)  # which raises where that is not possible, before anything has changed
        super().crop(keep)
        self.narrow.crop(keep)
        self.narrow.base = self.base.clone()

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"{_NARROW}{name}": tensor for name, tensor in self.narrow.state().items()}

    def counts(self) -> dict[str, bool | int]:
        return super().counts() | {f"{_NARROW}{name}": count for name, count in self.narrow.counts().items()}

    def restore(self, state: dict[str, Tensor], counts: dict[str, bool | int]) -> None:
        super().restore(state, counts)
        self.narrow.restore(below(_NARROW, state), below(_NARROW, counts))

    def masks(self, mask: object, narrow: object) -> dict[str, object]:
        """The masks of a forward by the kinds of layers in the model's config: that of the narrow layers, and of the others."""
        model = self.model
        assert model is not None
        kinds = model.config.get_text_config(decoder=True).layer_types
        return {kind: narrow if kind == "sliding_attention" else mask for kind in kinds}


def below(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


class RecurrentTable(SlotTable):
    """The table of a model with layers of linear attention: rows may be padded in front of their first token only."""

    per_row: ClassVar[tuple[str, ...]] = (*SlotTable.per_row, "ended")

    def clear(self) -> None:
        super().clear()
        self.ended = torch.zeros(1, dtype=torch.bool)

    def require_unbroken(self, valid: Tensor) -> None:
        """Refuse tokens behind padding that is behind a token; boolean ``(rows, length)``, true for tokens."""
        begun = (self.seen > 0)[:, None] | (valid.cumsum(dim=1) > 0)
        ended = self.ended[:, None] | ((begun & ~valid).cumsum(dim=1) > 0)
        if bool((ended & valid).any()):
            row = int((ended & valid).any(dim=1).nonzero()[0, 0])
            raise ConfigurationError(
                f"row {row} has padding between its tokens, and its layers of linear attention have taken the padding into "
                "their state; pad rows on the left, and give a row that has ended no more tokens"
            )
        self.ended = ended[:, -1]

    def masks(self, mask: object, valid: Tensor) -> object:
        """``mask``, by kinds of layers where new columns are padding: states take in ``valid`` ones, ``(batch, length)``."""
        model = self.model
        if model is None or bool(valid.all()):
            return mask
        kinds = set(model.config.get_text_config(decoder=True).layer_types)
        if HYBRID in kinds:  # whose two halves go by the names of layers of one kind
            kinds |= {"full_attention", "linear_attention"}
        return {kind: valid if kind in RECURRENT_KINDS else mask for kind in kinds}

    def crop(self, keep: int) -> None:
        raise ConfigurationError(
            "tokens cannot be taken back: layers of linear attention have taken them into their state. reset() the cache and "
            "read the text again"
        )
