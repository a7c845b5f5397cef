"""Passkey: a number stated once in a long stretch of the same few sentences, and asked for at the end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from sinklab.corpora.base import Encoder, Identity
from sinklab.registry import tasks
from sinklab.tasks._writing import distances, encode, numbers, repeated
from sinklab.tasks.base import Document, Task

__all__ = ["Passkey"]

INTRODUCTION = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
FACT, REMINDER = "The pass key is", ". Remember it.\n"
QUESTION = "What is the pass key? The pass key is"
DIGITS = 5


@tasks.register("passkey")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Passkey(Task):
    """Which of four numbers of five digits was stated; Mohtashami & Jaggi 2023 (arXiv 2305.16300).

    All texts have about the same number of tokens; documents of an item differ in how far back the key was stated.

    Args:
        length: tokens of a text, in budgets.
        distances: from the key, where it was stated, to the end, as shares of the budget.
    """

    length: float = 2.0
    distances: tuple[float, ...] = (0.5, 0.9, 1.1)

    @property
    def identity(self) -> Identity:
        return Identity(source="sentences of Mohtashami & Jaggi 2023 (arXiv 2305.16300)", revision="2", licence="none")

    def documents(self, encoder: Encoder, *, budget: int, items: int, seed: int) -> Iterator[Document]:
        def size(text: str) -> int:
            return len(encode(encoder, text, self.name))

        key_size = size(" 12345")
        least = 2 * key_size + size(REMINDER) + size(QUESTION) - 2
        around = size(INTRODUCTION) + size(FACT) + 2
        for distance in distances(self.distances, budget, least, self.name):
            before = repeated(encoder, FILLER, max(0, round(self.length * budget) - distance - around), self.name)
            after = repeated(encoder, FILLER, distance - least, self.name)
            front = f"{INTRODUCTION}{before}{FACT}"
            for item in range(items):
                key, *wrong = (f" {number}" for number in numbers(DIGITS, random.Random(f"passkey {seed} {distance} {item}")))
                yield Document(item, distance, f"{front}{key}{REMINDER}{after}{QUESTION}", key, tuple(wrong), fact=len(front))
