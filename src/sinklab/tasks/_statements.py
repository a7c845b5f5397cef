"""Statements: beginnings of sentences in pairs, of which each is ended rightly by the word that is wrong behind the other."""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch

from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError, InputError
from sinklab.tasks._writer import Writer, encode, passages
from sinklab.tasks.base import Axis, Sheet, Task

__all__ = ["Pair", "Statement", "StatementTask", "read_statement", "statement_sheets"]


class Pair(NamedTuple):
    """Two beginnings; the first ends with the first word, the second with the second."""

    first: str
    second: str
    first_word: str
    second_word: str


class Statement(NamedTuple):
    """A beginning in tokens, the next token of the right word, and that of the wrong one."""

    beginning: list[int]
    right: int
    wrong: int


def read_statement(encoder: Encoder, beginning: str, right: str, wrong: str, task: str) -> Statement:
    """The statement up to the token at which its two ends part: what both have in common belongs to the beginning.

    Raises:
        InputError: no tokenizer, or one under which one end is the beginning of the other.
    """
    ids = [encode(encoder, f"\n{beginning}{word}", task) for word in (right, wrong)]
    common = next((at for at, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), None)
    if not common:
        raise InputError(f"task {task!r}: this tokenizer does not tell {beginning + right!r} from {beginning + wrong!r}")
    return Statement(ids[0][:common], ids[0][common], ids[1][common])


def statement_sheets(
    pairs: Sequence[Pair],
    encoder: Encoder,
    *,
    corpus: str,
    lengths: Sequence[float],
    budget: int,
    rows: int,
    seed: int,
    bos: bool,
    task: str,
) -> Iterator[Sheet]:
    """Two sheets, each with one statement of the pair of every row, behind as much real text as fills the length.

    A pair is an item: whoever likes one word better whatever stands before it is right once and wrong once. Which of the two
    comes first is drawn.

    Args:
        lengths: tokens before the answer, in budgets, one for each sheet, ascending.

    Raises:
        ConfigurationError: more rows than pairs.
        InputError: see :func:`~sinklab.tasks._writer.passages` and :func:`read_statement`.
    """
    if rows > len(pairs):
        raise ConfigurationError(f"task {task!r} has {len(pairs)} pairs of statements, and `items` {rows} asks for more")
    generator = random.Random(f"{task} {seed}")
    chosen = generator.sample(list(pairs), rows)
    swapped = [generator.random() < 0.5 for _ in chosen]
    sizes = [round(length * budget) for length in lengths]
    texts = passages(corpus, encoder, length=sizes[-1], rows=rows, seed=seed, task=task)
    for which, size in enumerate(sizes):
        statements = [
            read_statement(encoder, pair.second, pair.second_word, pair.first_word, task)
            if swap != bool(which)
            else read_statement(encoder, pair.first, pair.first_word, pair.second_word, task)
            for pair, swap in zip(chosen, swapped, strict=True)
        ]
        longest = max(len(statement.beginning) for statement in statements)
        if longest >= size:
            raise ConfigurationError(f"task {task!r}: a statement takes {longest} tokens; choose a `window` of as many or more")
        writer = Writer(encoder, rows, bos=bos, task=task)
        rows_of_text = zip(texts, statements, strict=True)
        writer.put(torch.tensor([[*text[: size - len(s.beginning)].tolist(), *s.beginning] for text, s in rows_of_text]))
        alphabet = torch.tensor([sorted((statement.right, statement.wrong)) for statement in statements])
        writer.ask(torch.tensor([[statement.right] for statement in statements]), alphabet)
        yield writer.sheet(at=size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatementTask(Task):
    """What tasks of pairs of statements share: a text in front, and that who prefers one word is right in half of the cases."""

    axis: ClassVar[Axis] = "position"
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

    def sheets(self, encoder: Encoder, *, budget: int, rows: int, seed: int, bos: bool) -> Iterator[Sheet]:
        yield from statement_sheets(
            self.pairs, encoder,
            corpus=self.corpus, lengths=self.lengths, budget=budget, rows=rows, seed=seed, bos=bos, task=self.name,
        )  # fmt: skip
