"""What a task is: texts of one layout with answers at known columns, and how far back lies what an answer needs."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from torch import Tensor

from sinklab.corpora.base import Encoder, Identity

__all__ = ["Axis", "Metric", "Question", "Sheet", "Task"]

Metric = Literal["choice", "log_likelihood"]
"""``choice``: share of the answer's tokens at which the right symbol is the likeliest of the alphabet. ``log_likelihood``: nats
per token of the answer. Both are better when larger."""

Axis = Literal["distance", "context", "position"]
"""What the sheets of a task vary: how far back the fact lies, how many tokens stand before the answer, or how late it comes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """Columns ``[start, stop)`` hold the right answer; it is scored given everything before it.

    Attributes:
        start, stop: columns, ``1 <= start < stop``.
        distance: tokens before the query of the last answer token, column ``stop - 2``, that must be held for the whole fact
            to be visible; 0 if no single fact is needed.
        alphabet: int64 ``(symbols,)``, the ids among which the right one is to be chosen at each column, or ``(rows, symbols)``
            where every row has its own; ``None`` if only the log-likelihood counts. The right ones are drawn from it evenly, so
            chance is ``1 / symbols``.
    """

    start: int
    stop: int
    distance: int = 0
    alphabet: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Sheet:
    """Texts of one layout.

    Attributes:
        tokens: int64 ``(rows, length)``; row ``r`` of every sheet of a task belongs to the same item.
        questions: in the order of their columns; they do not overlap.
        at: where the sheet stands on the task's axis; on the axis ``position`` the questions' starts are used instead.
    """

    tokens: Tensor
    questions: tuple[Question, ...]
    at: int

    def rows(self, start: int, stop: int) -> Sheet:
        """Rows ``[start, stop)``."""
        questions = (
            question
            if question.alphabet is None or question.alphabet.ndim == 1
            else dataclasses.replace(question, alphabet=question.alphabet[start:stop])
            for question in self.questions
        )
        return Sheet(self.tokens[start:stop], tuple(questions), self.at)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Sheets made from a seed; a frozen dataclass whose fields are its settings.

    Attributes:
        name: set by the registry.
        metric: the score that verdicts are about.
        axis: what varies from sheet to sheet.
        chance: value of the metric for a model that knows nothing; ``None`` if there is no such value.
        minimal_effect: smallest difference of the metric that counts as one.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric] = "choice"
    axis: ClassVar[Axis] = "distance"
    chance: ClassVar[float | None] = 0.1
    minimal_effect: ClassVar[float] = 0.05

    @property
    @abc.abstractmethod
    def identity(self) -> Identity:
        """Where the texts come from."""

    @abc.abstractmethod
    def sheets(self, encoder: Encoder, *, budget: int, rows: int, seed: int, bos: bool) -> Iterator[Sheet]:
        """Sheets of ``rows`` texts; the same arguments give the same ones.

        Args:
            encoder: tokenizer and beginning-of-sequence id.
            budget: tokens before the query that a bounded policy holds; lengths and distances are chosen around it.
            bos: put the beginning-of-sequence token in front.

        Raises:
            InputError: a model without a tokenizer, or a source of text that is too short.
            ConfigurationError: the fact and the question do not fit into the budget.
        """

    @property
    def settings(self) -> dict[str, object]:
        """Name and fields, for the run record."""
        return {"name": self.name, **dataclasses.asdict(self)}
