"""What a task is: texts with one question each, whose right answer is known, and how far back lies what the answer needs."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from sinklab.corpora.base import Encoder, Identity

__all__ = ["Axis", "Document", "Score", "Task"]

Score = Literal["acc", "log_likelihood"]
"""``acc``: the right answer is the likeliest of those given. ``log_likelihood``: nats per token of the answer."""

Axis = Literal["distance", "context"]
"""What documents of a task vary: how far back the fact lies, or how many tokens stand before the answer."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One question: a text, and the answers that may come behind it.

    Attributes:
        item: documents of one item share their text or are twins; their scores are averaged, since they are not independent.
        place: where the document stands on the task's axis, in tokens.
        context: everything before the answer; no blank at its end.
        answer: the right one; the blank that parts it from the context is its first character.
        wrong: the other answers, each with its blank; none where the answer is scored by its likelihood.
        fact: the character of ``context`` with which that begins what the answer needs; ``None`` if it needs no single fact.
    """

    item: int
    place: int
    context: str
    answer: str
    wrong: tuple[str, ...] = ()
    fact: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Documents made from a seed; a frozen dataclass whose fields are its settings.

    Attributes:
        name: set by the registry.
        score: what verdicts are about.
        axis: what varies from document to document of an item; ``None`` where no length is to be read off.
        chance: score of a model that knows nothing; ``None`` of log-likelihoods.
        minimal_effect: smallest difference of the score that counts as one.
    """

    name: ClassVar[str]
    score: ClassVar[Score] = "acc"
    axis: ClassVar[Axis | None] = "distance"
    chance: ClassVar[float | None] = 0.25
    minimal_effect: ClassVar[float] = 0.05

    @property
    @abc.abstractmethod
    def identity(self) -> Identity:
        """Where the texts come from."""

    @abc.abstractmethod
    def documents(self, encoder: Encoder, *, budget: int, items: int, seed: int) -> Iterator[Document]:
        """Documents of so many items, each with the same places; the same arguments give the same ones.

        Args:
            encoder: tokenizer, by which lengths are counted.
            budget: tokens before the query that a bounded policy holds; lengths and distances are chosen around it.

        Raises:
            InputError: a model without a tokenizer, or a source of text that is too short.
            ConfigurationError: the fact and the question do not fit into the budget.
        """

    @property
    def settings(self) -> dict[str, object]:
        """Name and fields, for the run record."""
        return {"name": self.name, **dataclasses.asdict(self)}
