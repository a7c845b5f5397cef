"""Telemetry: what a cache holds, slot by slot and in figures; which token got which position is no secret of its."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from sinklab.streaming.ordered import OrderedBooks, OrderedStep
from sinklab.streaming.step import Books, Step

if TYPE_CHECKING:
    from sinklab.streaming.cache import PolicyCache
    from sinklab.streaming.reader import Reader

__all__ = ["Telemetry", "cache_telemetry", "describe_slots", "note_ids", "reader_telemetry"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Telemetry:
    """A cache in figures.

    Attributes:
        policy: in a few characters, such as ``4+1020``.
        seen: tokens of each row, padding left out.
        held: tokens of each row that are there now.
        capacity: most tokens that a row can hold; ``None`` where there is no end.
        bytes: of keys, values and what is kept beside them, as allocated.
        rebases: how often positions were counted anew.
        highest_position: largest position that a token was given so far, -1 before the first; ``None`` where it is not known.
    """

    policy: str
    seen: tuple[int, ...]
    held: tuple[int, ...]
    capacity: int | None
    bytes: int
    rebases: int
    highest_position: int | None

    @property
    def evicted(self) -> tuple[int, ...]:
        """Tokens of each row that are gone."""
        return tuple(seen - held for seen, held in zip(self.seen, self.held, strict=True))

    def __str__(self) -> str:
        room = "" if self.capacity is None else f" of {self.capacity:,}"
        highest = "" if self.highest_position is None else f"highest position {self.highest_position:,}, "
        return (
            f"{self.policy}: {_numbers(self.held)}{room} tokens held in {_size(self.bytes)}, {_numbers(self.seen)} seen, "
            f"{_numbers(self.evicted)} evicted, {highest}{self.rebases:,} re-bases"
        )


def cache_telemetry(cache: PolicyCache) -> Telemetry:
    """Of a cache of slots."""
    books = cache.books
    rows = max(1, cache.layers[0].batch_size)
    seen, held = books.seen, (books.index >= 0).sum(dim=1)
    return Telemetry(
        policy=cache.policy.describe(),
        seen=tuple(seen.expand(rows).tolist()),
        held=tuple(held.expand(rows).tolist()),
        capacity=cache.policy.num_slots,
        bytes=cache.bytes_held(),
        rebases=books.rebases,
        highest_position=books.highest_position if isinstance(books, Books) else None,
    )


def reader_telemetry(reader: Reader) -> Telemetry:
    """Of any reader; its rows are taken to be without padding, and to hold what the policy lets them."""
    seen = reader.position
    held = reader.policy.max_held(seen)
    return Telemetry(
        policy=reader.policy.describe(),
        seen=(seen,),
        held=(held,),
        capacity=reader.policy.max_held(1 << 62) if reader.policy.bounded else None,
        bytes=reader.bytes_held(),
        rebases=0,
        highest_position=None,
    )


def describe_slots(cache: PolicyCache, tokenizer: Any = None) -> pd.DataFrame:
    """The tokens that a cache holds, one a line, by row and slot.

    Returns:
        ``row``; ``slot``; ``token``, its index in the row, padding left out; ``id`` and ``text`` (with a tokenizer), missing
        where the model was given embeddings; ``pinned``; ``position``, at which the next token of the row sees it, counted as
        the model does now (see ``Books.base``); ``distance``, from there to the next token. Both are missing for a token that
        is gone when the next one is written.
    """
    books, ids = cache.books, cache.ids
    pinned = set(books.policy.pinned)
    rows = []
    for row in range(max(1, cache.layers[0].batch_size)):
        mine = row if books.rows > 1 else 0
        query = books.seen[mine]
        visible = books.policy.visible(query, books.index[mine]) & (books.index[mine] >= 0)
        distances, next_position = _distances(books, mine, query, visible)
        for slot, token in enumerate(books.index[mine].tolist()):
            if token < 0:
                continue
            known = -1 if ids is None else int(ids[row, slot])
            distance = distances[slot] if visible[slot] else None
            rows.append(
                {
                    "row": row,
                    "slot": slot,
                    "token": token,
                    "id": known if known >= 0 else None,
                    "text": tokenizer.decode([known]) if tokenizer is not None and known >= 0 else None,
                    "pinned": token in pinned,
                    "position": None if distance is None else next_position - distance,
                    "distance": distance,
                }
            )
    whole = {"row": "int64", "slot": "int64", "token": "int64", "id": "Int64", "position": "Int64", "distance": "Int64"}
    columns = ["row", "slot", "token", "id", "text", "pinned", "position", "distance"]
    return pd.DataFrame(rows, columns=columns).astype({**whole, "text": "string", "pinned": "bool"})


def _distances(books: Books | OrderedBooks, row: int, query: Tensor, visible: Tensor) -> tuple[list[int], int]:
    """Distance of every slot's token to the next one as the scores have it, and the position of that one."""
    if isinstance(books, OrderedBooks):  # columns are counted: those that stay, the next token last
        behind = visible.long().flip(0).cumsum(0).flip(0)
        return behind.tolist(), int(visible.sum())
    distances = query - books.index[row]
    if books.in_cache:
        distances[: len(books.pinned)] -= books.policy.evicted(query)
    return distances.tolist(), int(query - books.base[row])


def note_ids(table: Tensor | None, step: Step | OrderedStep, ids: Tensor | None, batch: int, slots: int) -> Tensor:
    """Which id is in which slot behind a step, int64 ``(batch, slots)``; -1 where the model was given embeddings.

    Args:
        table: that of the step before, written in place where slots stay slots and it fits the batch.
        ids: of this step, ``(batch, step.length)``.
    """
    if ids is None:
        ids = torch.full((batch, step.length), -1, device=step.position_ids.device if isinstance(step, Step) else "cpu")
    if isinstance(step, OrderedStep):
        if table is None or not step.held:
            return ids
        kept = table if step.source is None else table.gather(1, step.source.expand(batch, -1))
        return torch.cat((kept, ids), dim=1)
    if table is None or len(table) != batch:
        with torch.inference_mode(False):  # as of the layers' buffers
            table = torch.full((batch, slots), -1, device=ids.device)
    if step.source is not None:
        source = step.source.expand(batch, -1)
        table.copy_(torch.where(source >= 0, ids.gather(1, source.clamp(min=0)), table))
    elif isinstance(step.slot, Tensor):
        table[torch.arange(batch, device=table.device), step.slot] = ids[:, 0]
    else:
        table[:, step.slot] = ids[:, 0]
    return table


def _numbers(of_rows: tuple[int, ...]) -> str:
    """One number if all rows have the same, else one for each."""
    return " | ".join(f"{number:,}" for number in (of_rows[:1] if len(set(of_rows)) == 1 else of_rows))


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
