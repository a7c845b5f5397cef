"""Reader: a model that reads a text under a policy, as much at a time as one likes; streams, losses and scores rest on it."""

from __future__ import annotations

import abc
import dataclasses

import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.maps import token_text
from sinklab.policies.base import Policy
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.table import SlotTable


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


def describe_slots(table: SlotTable, batch: int, tokenizer: Tokenizer | None = None) -> pd.DataFrame:
    """The tokens that a cache of ``batch`` rows holds, one a line, by row and slot.

    Returns:
        ``row``; ``slot``; ``token``, its index in the row, padding left out; ``id`` and ``text`` (with a tokenizer), missing
        where the model was given embeddings; ``pinned``; ``position``, at which the next token of the row sees it, counted as
        the model does now; ``distance``, from there to the next token. Both are missing for a token that
        is gone when the next one is written.
    """
    pinned, lines = set(table.policy.pinned), []
    for row in range(batch):
        table_row = row if table.rows > 1 else 0
        index = table.index[table_row]
        visible = table.policy.visible(table.seen[table_row], index) & (index >= 0)
        distances, next_position = table.distances(table_row)
        for slot, token in enumerate(index.tolist()):
            if token < 0:
                continue
            token_id = -1 if table.ids is None else int(table.ids[row, slot])
            distance = distances[slot] if visible[slot] else None
            text = token_text(tokenizer, token_id) if tokenizer is not None and token_id >= 0 else None
            position = None if distance is None else next_position - distance
            shown = token_id if token_id >= 0 else None
            lines.append((row, slot, token, shown, text, token in pinned, position, distance))
    dtypes = dict.fromkeys(("row", "slot", "token"), "int64") | dict.fromkeys(("id", "position", "distance"), "Int64")
    columns = ["row", "slot", "token", "id", "text", "pinned", "position", "distance"]
    return pd.DataFrame(lines, columns=columns).astype({**dtypes, "text": "string", "pinned": "bool"})


def _numbers(of_rows: tuple[int, ...]) -> str:
    """One number if all rows have the same, else one for each."""
    return " | ".join(f"{number:,}" for number in (of_rows[:1] if len(set(of_rows)) == 1 else of_rows))


def _size(count: int) -> str:
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next((f"{count / size:.1f} {unit}" for unit, size in units if count >= size), f"{count} bytes")


def forget_media(model: PreTrainedModel) -> None:
    """A text without pictures begins: its positions are not those behind the pictures of the last generate().

    Qwen2-VL and its kin remember by how much these have moved positions, and add it to every token behind a cache.
    """
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


class Reader(abc.ABC):
    """A model, a policy, and what has been read so far.

    Attributes:
        model: in the mode (training or not) in which it was given.
        policy: what a token may see of those before it.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy) -> None:
        self.model, self.policy = model, policy

    @abc.abstractmethod
    def read(self, tokens: Tensor, attention_mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
        """Logits for the token behind each of these, ``(batch, length or keep, vocab_size)``; no gradient.

        Args:
            tokens: int64 ``(batch, length)``; they go on where the last call ended; how a text is divided among calls does not
                matter.
            attention_mask: ``(batch, length)``, 1 for tokens and 0 for padding; of these tokens only.
            keep: logits of the last so many tokens; 0 for all.
        """

    def pass_over(self, tokens: Tensor) -> None:
        """Read tokens, ``(batch, length)`` without padding, whose logits nobody wants."""
        self.read(tokens, keep=1)

    @property
    @abc.abstractmethod
    def position(self) -> int:
        """Columns read so far, padding included."""

    @abc.abstractmethod
    def bytes_held(self) -> int:
        """Bytes of the keys and values that are kept between calls."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}; {self.telemetry()})"

    def telemetry(self) -> Telemetry:
        """What is held, and what has gone, in figures.

        By default rows are taken to be without padding, and to hold what the policy lets them.
        """
        policy, seen = self.policy, self.position
        return Telemetry(
            policy=policy.describe(),
            seen=(seen,),
            held=(policy.max_held(seen),),
            capacity=policy.max_held(1 << 62) if policy.bounded else None,
            bytes=self.bytes_held(),
            rebases=0,
            highest_position=None,
        )

    @abc.abstractmethod
    def reset(self) -> None:
        """Begin a new text."""
