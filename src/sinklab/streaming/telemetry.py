"""Telemetry: what a cache holds, slot by slot and in figures: which token is there, and at which position."""

from __future__ import annotations

import dataclasses

import pandas as pd

from sinklab.attention.token_text import token_text
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.table import IndexedTable

__all__ = ["Telemetry", "describe_slots"]


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


def describe_slots(table: IndexedTable, batch: int, tokenizer: Tokenizer | None = None) -> pd.DataFrame:
    """The tokens that a cache of ``batch`` rows holds, one a line, by row and slot.

    Returns:
        ``row``; ``slot``; ``token``, its index in the row, padding left out; ``id`` and ``text`` (with a tokenizer), missing
        where the model was given embeddings; ``pinned``; ``position``, at which the next token of the row sees it, counted as
        the model does now (see ``Table.base``); ``distance``, from there to the next token. Both are missing for a token that
        is gone when the next one is written.
    """
    pinned, lines = set(table.policy.pinned), []
    for row in range(batch):
        table_row = row if table.rows > 1 else 0
        index = table.index[table_row]
        visible = table.policy.visible(table.seen[table_row], index) & (index >= 0)
        distances, next_position = table.distances(table_row, visible)
        for slot, token in enumerate(index.tolist()):
            if token < 0:
                continue
            token_id = -1 if table.ids is None else int(table.ids[row, slot])
            distance = distances[slot] if visible[slot] else None
            lines.append(
                {
                    "row": row,
                    "slot": slot,
                    "token": token,
                    "id": token_id if token_id >= 0 else None,
                    "text": token_text(tokenizer, token_id) if tokenizer is not None and token_id >= 0 else None,
                    "pinned": token in pinned,
                    "position": None if distance is None else next_position - distance,
                    "distance": distance,
                }
            )
    dtypes = dict.fromkeys(("row", "slot", "token"), "int64") | dict.fromkeys(("id", "position", "distance"), "Int64")
    columns = ["row", "slot", "token", "id", "text", "pinned", "position", "distance"]
    return pd.DataFrame(lines, columns=columns).astype({**dtypes, "text": "string", "pinned": "bool"})


def _numbers(of_rows: tuple[int, ...]) -> str:
    """One number if all rows have the same, else one for each."""
    return " | ".join(f"{number:,}" for number in (of_rows[:1] if len(set(of_rows)) == 1 else of_rows))


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
