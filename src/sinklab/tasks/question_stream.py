"""Question stream: in one long text, each turn states three facts and asks about one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import ClassVar

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError
from sinklab.registry import tasks
from sinklab.tasks._writer import Writer, digits, draw
from sinklab.tasks.base import Axis, Sheet, Task

__all__ = ["QuestionStream"]

NAMES = ("Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "June")
FACTS = 3
DIGITS = 2


@tasks.register("question_stream")
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionStream(Task):
    """Every turn can be answered from itself; what differs is how late in the stream it comes.

    It stands for the streaming question answering of Xiao et al. 2024 (arXiv 2309.17453), where the questions of a
    benchmark are put one after the other; these are generated, so that no answer can be known beforehand.

    Args:
        length: tokens of the stream, in budgets.
    """

    axis: ClassVar[Axis] = "position"

    length: float = 4.0

    def __post_init__(self) -> None:
        if self.length <= 1:
            raise ConfigurationError(f"task 'question_stream': length {self.length} must be above 1, or no cache is ever full")

    @property
    def identity(self) -> Identity:
        return Identity(source="generated turns of three facts and a question", revision="1", licence="none")

    def sheets(self, encoder: Encoder, *, budget: int, rows: int, seed: int, bos: bool) -> Iterator[Sheet]:
        generator = random.Random(f"question_stream {seed}")
        alphabet = digits(encoder, self.name)
        writer = Writer(encoder, rows, bos=bos, task=self.name)
        while writer.position < self.length * budget:
            facts = []
            for name in generator.sample(NAMES, FACTS):
                number = draw(alphabet, rows, DIGITS, generator)
                facts.append((writer.text(f"{name} has "), name, number))
                writer.put(number)
                writer.text(".\n")
            fact, name, number = generator.choice(facts)
            writer.text(f"Q: What does {name} have?\nA: {name} has ")
            writer.ask(number, alphabet, fact)
            writer.text(".\n")
        yield writer.sheet()
