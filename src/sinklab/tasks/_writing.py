"""What tasks share: texts of so many tokens, facts at a distance, and statements of which one word is true."""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar, NamedTuple

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError, InputError
from sinklab.tasks.base import Axis, Document, Task

__all__ = ["Pair", "StatementTask", "decode", "distances", "encode", "numbers", "passages", "placed", "repeated"]

CHOICES = 4
"""Numbers among which the right one is to be chosen; chance is a quarter."""


def encode(encoder: Encoder, text: str, task: str) -> list[int]:
    """Ids of a text without special tokens.

    Raises:
        InputError: the model came without a tokenizer.
    """
    if encoder.tokenizer is None:
        raise InputError(
            f"task {task!r} is made of text and this model has no tokenizer; give a model directory that holds one"
        )
    return encoder.encode(text)


def decode(encoder: Encoder, ids: Sequence[int]) -> str:
    """The text of ids, with the blanks that it had."""
    assert encoder.tokenizer is not None, "what was encoded has a tokenizer"
    return str(encoder.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def placed(encoder: Encoder, documents: Sequence[Document]) -> list[Document]:
    """Documents of one layout at their distance, on average: tokens held before the last query with which the fact is seen."""
    reaches = [len(encoder.encode(one.context[one.fact :] + one.answer)) - 2 for one in documents]
    return [dataclasses.replace(one, place=round(sum(reaches) / len(reaches))) for one in documents]


def numbers(digits: int, generator: random.Random, count: int = CHOICES) -> list[str]:
    """Different numbers of so many digits, drawn evenly; the first is to be the right one."""
    return [f"{number:0{digits}d}" for number in generator.sample(range(10**digits), count)]


def repeated(encoder: Encoder, text: str, length: int, task: str) -> str:
    """The last ``length`` tokens of an endless repetition of a text, so that what follows begins after a whole sentence."""
    ids = encode(encoder, text, task)
    times = -(-length // len(ids))
    return decode(encoder, (ids * times)[len(ids) * times - length :])


def distances(shares: Sequence[float], budget: int, least: int, task: str) -> list[int]:
    """Distances in tokens: the least possible one, and those shares of the budget that are larger.

    Raises:
        ConfigurationError: the budget does not hold even the least.
    """
    if least > budget:
        raise ConfigurationError(
            f"task {task!r}: fact and question take {least:,} tokens of this tokenizer, and a window of {budget:,} never holds "
            f"both; choose a `window` of {least} or more"
        )
    return sorted({least, *(round(share * budget) for share in shares if round(share * budget) > least)})


def passages(corpus: str, encoder: Encoder, *, length: int, items: int, seed: int, task: str) -> list[list[int]]:
    """Passages of a corpus, ids of ``length`` tokens each, without special tokens.

    Raises:
        InputError: no tokenizer, or a corpus that is too short.
    """
    if encoder.tokenizer is None:
        raise InputError(f"task {task!r} reads text and this model has no tokenizer; give a model directory that holds one")
    source = resolve_corpus(corpus)
    texts = [list(map(int, row)) for row in islice(source.rows(encoder, length, seed), items)]
    if len(texts) < items:
        raise InputError(
            f"task {task!r}: corpus {source.name!r} ({source.identity.source}) is too short: it gives {len(texts)} of {items} "
            f"passages of {length:,} tokens; lower `items` or `window`, or give a longer text"
        )
    return texts


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
    lengths: tuple[float, float] = (2.0, 2.25)

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
