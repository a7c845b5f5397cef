"""Line lookup (StreamEval): a stream of numbered registers; every few lines the content of an earlier one is asked."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError
from sinklab.registry import tasks
from sinklab.tasks._writer import Writer, digits, draw, encode
from sinklab.tasks.base import Sheet, Task

__all__ = ["LineLookup"]

BEFORE_LABEL, BEFORE_CONTENT, END = "line ", ": REGISTER_CONTENT is ", "\n"
QUESTION = "Recall line "
LABEL, CONTENT = 3, 4
LABELS = 1000


@tasks.register("line_lookup")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LineLookup(Task):
    """The stream of Xiao et al. 2024 (arXiv 2309.17453), StreamEval, made anew, since its data were never released.

    A line is ``line 417: REGISTER_CONTENT is 5802`` with random digits; a question repeats the line up to its content, with
    ``Recall`` in front. The stream goes on until some questions have been asked after more tokens than the budget holds. By the
    paper accuracy does not fall slowly: it ends where the asked line has left the cache.

    Args:
        every: lines from one question to the next.
        back: how many lines back the asked line is; one sheet each.
        shares: further distances, as shares of the budget.
        questions: to be asked after the cache is full.
    """

    every: int = 10
    back: tuple[int, ...] = (20,)
    shares: tuple[float, ...] = (0.5, 0.8, 1.2, 2.0)
    questions: int = 2

    def __post_init__(self) -> None:
        if self.every < 1 or self.questions < 1 or any(back < 1 for back in self.back):
            raise ConfigurationError(
                f"task 'line_lookup': every {self.every}, back {self.back} and questions {self.questions} must be 1 or more"
            )

    @property
    def identity(self) -> Identity:
        return Identity(source="generated register lines", revision="1", licence="none")

    def sheets(self, encoder: Encoder, *, budget: int, rows: int, seed: int, bos: bool) -> Iterator[Sheet]:
        alphabet = digits(encoder, self.name)
        line = sum(len(encode(encoder, text, self.name)) for text in (BEFORE_LABEL, BEFORE_CONTENT, END)) + LABEL + CONTENT
        # The asked line and the question take a line each; between two questions there are `every` lines and a question.
        per_line = line * (self.every + 1) / self.every
        swept = (round((share * budget - 2 * line) / per_line) for share in self.shares)
        for back in sorted({*self.back, *(lines for lines in swept if lines >= 1)}):
            yield self._sheet(encoder, alphabet, back, budget, rows, random.Random(f"line_lookup {seed} {back}"), bos)

    def _sheet(
        self, encoder: Encoder, alphabet: Tensor, back: int, budget: int, rows: int, generator: random.Random, bos: bool
    ) -> Sheet:
        writer = Writer(encoder, rows, bos=bos, task=self.name)
        labels = [generator.sample(range(LABELS), LABELS) for _ in range(rows)]
        written: list[tuple[int, Tensor, Tensor]] = []
        questions_asked = 0
        while questions_asked < self.questions:
            number = len(written)
            if number == LABELS:
                raise ConfigurationError(
                    f"task 'line_lookup' has {LABELS} labels, which are used up before {self.questions} questions {back} lines "
                    f"back could be asked with a window of {budget}; ask fewer, or choose a smaller window"
                )
            label = alphabet[torch.tensor([[int(digit) for digit in f"{row[number]:0{LABEL}d}"] for row in labels])]
            content = draw(alphabet, rows, CONTENT, generator)
            writer.text(BEFORE_LABEL)
            begin = writer.put(label)
            writer.text(BEFORE_CONTENT)
            writer.put(content)
            writer.text(END)
            written.append((begin, label, content))
            if len(written) % self.every == 0 and len(written) > back:
                fact, label, content = written[-1 - back]
                writer.text(QUESTION)
                writer.put(label)
                writer.text(BEFORE_CONTENT)
                questions_asked += writer.ask(content, alphabet, fact).start >= budget + 2
                writer.text(END)
        return writer.sheet()
