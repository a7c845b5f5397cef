"""Needle: one sentence of another kind in a haystack of real text, asked for at the end; retrieval by depth."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder, Identity
from sinklab.registry import tasks
from sinklab.tasks._writer import Writer, digits, distances, draw, encode, passages
from sinklab.tasks.base import Sheet, Task

__all__ = ["Needle"]

FACT = "\nThe special magic number of Lisbon is "
END = ".\n"
QUESTION = "\nWhat is the special magic number of Lisbon? The special magic number of Lisbon is "
DIGITS = 5


@tasks.register("needle")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Five digits in real text; the needle in a haystack, in the words of RULER (Hsieh et al. 2024, arXiv 2404.06654).

    The depth of a needle, as it is usually given, is ``1 - distance / tokens of the text``.

    Args:
        corpus: the haystack: a name, a text file or a folder.
        length: tokens of a text, in budgets.
        distances: from the first digit of the needle to the end, as shares of the budget.
    """

    corpus: str = "python_source"
    length: float = 4.0
    distances: tuple[float, ...] = (0.5, 0.75, 0.9, 1.1, 1.5, 2.5)

    @property
    def identity(self) -> Identity:
        return resolve_corpus(self.corpus).identity

    def sheets(self, encoder: Encoder, *, budget: int, rows: int, seed: int, bos: bool) -> Iterator[Sheet]:
        alphabet = digits(encoder, self.name)
        fact_size, end_size, question_size = (len(encode(encoder, text, self.name)) for text in (FACT, END, QUESTION))
        least = DIGITS + end_size + question_size + DIGITS - 2
        chosen = distances(self.distances, budget, least, self.name)
        length = max(round(self.length * budget), chosen[-1] + 2 + bos + fact_size)
        haystacks = passages(self.corpus, encoder, length=length, rows=rows, seed=seed, task=self.name)
        for distance in chosen:
            number = draw(alphabet, rows, DIGITS, random.Random(f"needle {seed} {distance}"))
            before = length - distance - 2 - bos - fact_size
            after = distance - least
            writer = Writer(encoder, rows, bos=bos, task=self.name)
            writer.put(haystacks[:, :before])
            writer.text(FACT)
            fact = writer.put(number)
            writer.text(END)
            writer.put(haystacks[:, before : before + after])
            writer.text(QUESTION)
            writer.ask(number, alphabet, fact)
            yield writer.sheet()
