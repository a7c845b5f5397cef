"""Passkey: a number stated once in a long stretch of the same few sentences, and asked for at the end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from sinklab.corpora.base import Encoder, Identity
from sinklab.registry import tasks
from sinklab.tasks._writer import Writer, digits, distances, draw, encode
from sinklab.tasks.base import Sheet, Task

__all__ = ["Passkey"]

INTRODUCTION = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
FACT = "The pass key is "
REMINDER = ". Remember it.\n"
QUESTION = "What is the pass key? The pass key is "
DIGITS = 5


@tasks.register("passkey")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Passkey(Task):
    """Five digits, repeated from memory; Mohtashami & Jaggi 2023 (arXiv 2305.16300).

    All texts have the same number of tokens; the sheets differ in how far back the key was stated.

    Args:
        length: tokens of a text, in budgets.
        distances: from the first digit of the key, where it was stated, to the end, as shares of the budget.
    """

    length: float = 4.0
    distances: tuple[float, ...] = (0.5, 0.75, 0.9, 1.1, 1.5, 2.5)

    @property
    def identity(self) -> Identity:
        return Identity(source="sentences of Mohtashami & Jaggi 2023 (arXiv 2305.16300)", revision="1", licence="none")

    def sheets(self, encoder: Encoder, *, budget: int, rows: int, seed: int, bos: bool) -> Iterator[Sheet]:
        alphabet = digits(encoder, self.name)
        size = {text: len(encode(encoder, text, self.name)) for text in (INTRODUCTION, FACT, REMINDER, QUESTION)}
        least = DIGITS + size[REMINDER] + size[QUESTION] + DIGITS - 2
        filler = encode(encoder, FILLER, self.name)
        for distance in distances(self.distances, budget, least, self.name):
            key = draw(alphabet, rows, DIGITS, random.Random(f"passkey {seed} {distance}"))
            after = distance - least
            before = max(0, round(self.length * budget) - distance - 2 - bos - size[INTRODUCTION] - size[FACT])
            writer = Writer(encoder, rows, bos=bos, task=self.name)
            writer.text(INTRODUCTION)
            writer.put(_repeated(filler, before))
            writer.text(FACT)
            fact = writer.put(key)
            writer.text(REMINDER)
            writer.put(_repeated(filler, after))
            writer.text(QUESTION)
            writer.ask(key, alphabet, fact)
            yield writer.sheet()


def _repeated(ids: list[int], length: int) -> list[int]:
    """The last ``length`` tokens of endless repetition, so that what follows begins after a whole sentence."""
    times = -(-length // len(ids))
    return (ids * times)[len(ids) * times - length :]
