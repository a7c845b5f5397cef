"""Line lookup (StreamEval): a stream of numbered registers; every few lines the content of an earlier one is asked."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError
from sinklab.registry import tasks
from sinklab.tasks._writing import CHOICES, encode, placed
from sinklab.tasks.base import Document, Task

__all__ = ["LineLookup"]

LINE = "line {:03d}: REGISTER_CONTENT is {:04d}\n"
ANSWER = " {:04d}"
LABELS, CONTENTS = 1000, 10_000


@tasks.register("line_lookup")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LineLookup(Task):
    """The stream of Xiao et al. 2024 (arXiv 2309.17453), StreamEval, made anew, since its data were never released.

    A line is ``line 417: REGISTER_CONTENT is 5802`` with random digits; a question repeats the line up to its content, with
    ``Recall`` in front, and is answered in the stream. The last question of a document, behind two budgets of tokens or more,
    is the one that is scored: its content is chosen among those of four lines. Documents of an item are one stream and differ
    in that question. By the paper accuracy does not fall slowly: it ends where the asked line has left the cache.

    Args:
        every: lines from one question to the next.
        back: how many lines back the asked line is; one document of an item each.
        shares: further distances, as shares of the budget.
    """

    every: int = 10
    back: tuple[int, ...] = (20,)
    shares: tuple[float, ...] = (0.5, 0.8, 1.2)

    def __post_init__(self) -> None:
        if self.every < 1 or any(back < 1 for back in self.back):
            raise ConfigurationError(f"task 'line_lookup': every {self.every} and back {self.back} must be 1 or more")

    @property
    def identity(self) -> Identity:
        return Identity(source="generated register lines", revision="4", licence="none")

    def documents(self, encoder: Encoder, *, budget: int, items: int, seed: int) -> Iterator[Document]:
        line = len(encode(encoder, LINE.format(417, 5802), self.name))
        # The asked line and the question take a line each; between two questions there are `every` lines and a question.
        per_line = line * (self.every + 1) / self.every
        swept = (round((share * budget - 2 * line) / per_line) for share in self.shares)
        # So many that nothing in the cache has seen the first ones; the question comes where one is due.
        filled = -(-(2 * budget + 2) // line)
        backs = sorted({*self.back, *(lines for lines in swept if lines >= 1)})
        lines = self.every * -(-max(filled, backs[-1] + 1, CHOICES) // self.every)
        if lines > LABELS:
            raise ConfigurationError(
                f"task 'line_lookup' has {LABELS} labels, and a question {backs[-1]} lines back behind a window of {budget} "
                f"takes {lines}; choose a smaller window or a smaller back"
            )
        drawn = [self._documents(item, backs, lines, random.Random(f"line_lookup {seed} {item}")) for item in range(items)]
        for of_back in zip(*drawn, strict=True):
            yield from placed(encoder, of_back)

    def _documents(self, item: int, backs: Sequence[int], lines: int, generator: random.Random) -> list[Document]:
        """One stream, with the last question as far back as each of these."""
        labels, contents = generator.sample(range(LABELS), lines), generator.sample(range(CONTENTS), lines)
        text, begins = "", list[int]()
        for number, (label, content) in enumerate(zip(labels, contents, strict=True), 1):
            begins.append(len(text))
            text += LINE.format(label, content)
            back = backs[number // self.every % len(backs)]
            if number % self.every == 0 and back < number < lines:
                text += "Recall " + LINE.format(labels[number - 1 - back], contents[number - 1 - back])
        documents = []
        for asked in (lines - 1 - back for back in backs):
            right = ANSWER.format(contents[asked])
            question = "Recall " + LINE.format(labels[asked], contents[asked]).removesuffix(f"{right}\n")
            others = generator.sample([number for number in range(lines) if number != asked], CHOICES - 1)
            wrong = tuple(ANSWER.format(contents[number]) for number in others)
            documents.append(Document(item, 0, text + question, right, wrong, fact=begins[asked]))
        return documents
