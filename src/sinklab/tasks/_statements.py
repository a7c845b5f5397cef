"""Statements: beginnings of sentences in pairs, of which each is ended rightly by the word that is wrong behind the other."""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError
from sinklab.tasks._writing import decode, encode, passages
from sinklab.tasks.base import Axis, Document, Task

__all__ = ["Pair", "StatementTask"]


class Pair(NamedTuple):
    """Two beginnings; the first ends with the first word, the second with the second."""

    first: str
    second: str
    first_word: str
    second_word: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatementTask(Task):
    """One document with each statement of a pair, behind as much real text as fills its length.

    A pair is an item: who prefers one word whatever stands before it is right once and wrong once. Which of the two statements
    comes first is drawn.
    """

    axis: ClassVar[Axis | None] = None
    chance: ClassVar[float | None] = 0.5

    corpus: str = "python_source"
    lengths: tuple[float, float] = (2.0, 3.0)

    def __post_init__(self) -> None:
        if not 0.0 < self.lengths[0] < self.lengths[1]:
            raise ConfigurationError(f"task {self.name!r}: lengths {self.lengths} must be two numbers above 0, ascending")

    @property
    @abc.abstractmethod
    def pairs(self) -> Sequence[Pair]:
        """The pairs of statements."""

    def documents(self, encoder: Encoder, *, budget: int, items: int, seed: int) -> Iterator[Document]:
        if items > len(self.pairs):
            raise ConfigurationError(
                f"task {self.name!r} has {len(self.pairs)} pairs of statements, and `items` {items} asks for more"
            )
        generator = random.Random(f"{self.name} {seed}")
        chosen = generator.sample(list(self.pairs), items)
        swapped = [generator.random() < 0.5 for _ in chosen]
        sizes = [round(length * budget) for length in self.lengths]
        texts = passages(self.corpus, encoder, length=sizes[-1], items=items, seed=seed, task=self.name)
        for which, size in enumerate(sizes):
            for item, (pair, swap, text) in enumerate(zip(chosen, swapped, texts, strict=True)):
                beginning, words = pair.first, pair[2:]
                if swap != bool(which):
                    beginning, words = pair.second, pair[:1:-1]
                tokens = len(encode(encoder, f"\n{beginning}", self.name))
                if tokens >= size:
                    raise ConfigurationError(
                        f"task {self.name!r}: a statement takes {tokens} tokens; choose a `window` of as many or more"
                    )
                yield Document(item, size, f"{decode(encoder, text[: size - tokens])}\n{beginning}", words[0], words[1:])
