"""Long text: how well the next tokens of a real text are predicted as more and more text precedes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError
from sinklab.registry import tasks
from sinklab.tasks._writing import decode, passages
from sinklab.tasks.base import Axis, Document, Score, Task

__all__ = ["LongText"]


@tasks.register("long_text")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LongText(Task):
    """Nats per token of the last tokens of a passage, read after contexts of several lengths.

    The scored text is the same for every length, so that lengths are compared pair by pair: where a longer context lowers the
    loss no further, what lies farther back is of no use under the policy. Perplexity is ``exp(-score)``.

    Args:
        corpus: what ``corpus`` of the commands is: a name, a text file or a folder.
        scored: tokens at the end of each passage that are scored.
        contexts: tokens before them, as shares of the budget.
    """

    score: ClassVar[Score] = "log_likelihood"
    axis: ClassVar[Axis | None] = "context"
    chance: ClassVar[float | None] = None

    corpus: str = "python_source"
    scored: int = 32
    contexts: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)

    def __post_init__(self) -> None:
        if self.scored < 1 or not self.contexts or min(self.contexts) <= 0:
            raise ConfigurationError(f"task 'long_text': scored {self.scored} and contexts {self.contexts} must be above 0")

    @property
    def identity(self) -> Identity:
        return resolve_corpus(self.corpus).identity

    def documents(self, encoder: Encoder, *, budget: int, items: int, seed: int) -> Iterator[Document]:
        contexts = sorted({max(1, round(share * budget)) for share in self.contexts})
        length = contexts[-1] + self.scored
        texts = passages(self.corpus, encoder, length=length, items=items, seed=seed, task=self.name)
        for context in contexts:
            for item, text in enumerate(texts):
                before = text[-self.scored - context : -self.scored]
                yield Document(item, context, decode(encoder, before), decode(encoder, text[-self.scored :]))
