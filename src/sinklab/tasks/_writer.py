"""Writer: puts the texts of one sheet together, token by token and all rows at once, and notes where the answers are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError, InputError
from sinklab.tasks.base import Question, Sheet

__all__ = ["Writer", "digits", "distances", "draw", "encode", "passages"]


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


def digits(encoder: Encoder, task: str) -> Tensor:
    """The ids of the digits 0 to 9, int64 ``(10,)``: each the last token of its text, which SentencePiece may begin with a
    space.

    Raises:
        InputError: no tokenizer, or one that does not tell the digits apart by one token each.
    """
    ids = [encode(encoder, str(digit), task)[-1:] for digit in range(10)]
    if any(not tokens for tokens in ids) or len({tokens[0] for tokens in ids}) < 10:
        raise InputError(
            f"task {task!r} asks for digits, and this tokenizer does not give each of them a token of its own; use long_text"
        )
    return torch.tensor([tokens[0] for tokens in ids])


def draw(alphabet: Tensor, rows: int, length: int, generator: random.Random) -> Tensor:
    """Symbols drawn evenly and independently, int64 ``(rows, length)``."""
    return alphabet[torch.tensor([[generator.randrange(len(alphabet)) for _ in range(length)] for _ in range(rows)])]


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


def passages(corpus: str, encoder: Encoder, *, length: int, rows: int, seed: int, task: str) -> Tensor:
    """Passages of a corpus, int64 ``(rows, length)``, without special tokens.

    Raises:
        InputError: no tokenizer, or a corpus that is too short.
    """
    if encoder.tokenizer is None:
        raise InputError(f"task {task!r} reads text and this model has no tokenizer; give a model directory that holds one")
    source = resolve_corpus(corpus)
    texts = list(islice(source.rows(encoder, length, seed), rows))
    if len(texts) < rows:
        raise InputError(
            f"task {task!r}: corpus {source.name!r} ({source.identity.source}) is too short: it gives {len(texts)} of {rows} "
            f"passages of {length:,} tokens; lower `items` or `window`, or give a longer text"
        )
    return torch.tensor(texts)


class Writer:
    """Columns of all rows, one after the other.

    Args:
        task: name used in messages.
    """

    def __init__(self, encoder: Encoder, rows: int, *, bos: bool, task: str) -> None:
        self.encoder, self.rows, self.task = encoder, rows, task
        self._parts: list[Tensor] = []
        self._questions: list[Question] = []
        self.position = 0
        if bos:
            assert encoder.bos_token_id is not None
            self.put([encoder.bos_token_id])

    def put(self, ids: Sequence[int] | Tensor) -> int:
        """Append ids, ``(length,)`` for all rows alike or ``(rows, length)``; the column at which they begin."""
        begin = self.position
        columns = torch.as_tensor(ids, dtype=torch.long).expand(self.rows, -1)
        self._parts.append(columns)
        self.position += columns.shape[1]
        return begin

    def text(self, text: str) -> int:
        """Append a text, the same in all rows; the column at which it begins."""
        return self.put(encode(self.encoder, text, self.task))

    def ask(self, answer: Tensor, alphabet: Tensor | None, fact: int | None = None) -> Question:
        """Append an answer ``(rows, length)`` as a question; ``fact`` is the first column that it needs."""
        start = self.put(answer)
        stop = self.position
        question = Question(start, stop, 0 if fact is None else stop - 2 - fact, alphabet)
        self._questions.append(question)
        return question

    def sheet(self, at: int | None = None) -> Sheet:
        """What has been written; ``at`` is by default the largest distance."""
        where = max(question.distance for question in self._questions) if at is None else at
        return Sheet(torch.cat(self._parts, dim=1), tuple(self._questions), where)
