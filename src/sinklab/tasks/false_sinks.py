"""False sinks: sink-like tokens in the middle of a real text; is the text after them still predicted as well?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import tasks
from sinklab.tasks._writing import decode, encode, passages
from sinklab.tasks.base import Axis, Document, Score, Task

__all__ = ["FalseSinks"]

Kind = Literal["bos", "delimiter", "repeated", "none"]


@tasks.register("false_sinks")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FalseSinks(Task):
    """Nats per token of the last tokens of a passage, with false sinks half a budget before them.

    Sinks form at first tokens and at delimiters (Sun et al. 2024, arXiv 2402.17762), and repeated tokens can take their role. A
    prompt may hold such tokens by accident or on purpose. Two questions: what they cost while the true sink is visible, against
    the same passages under ``kind=none``; and whether one of them takes the place of a true sink that is hidden, so that the
    score no longer depends on it.

    Args:
        corpus: a name, a text file or a folder.
        kind: ``bos``: further beginning-of-sequence tokens; ``delimiter``: full stops and line breaks in turn; ``repeated``:
            the token of `` the`` again and again; ``none``: the text as it is.
        count: how many tokens of that kind.
        scored: tokens at the end of each passage that are scored.
        contexts: tokens of text before them, as shares of the budget.
    """

    score: ClassVar[Score] = "log_likelihood"
    axis: ClassVar[Axis | None] = "context"
    chance: ClassVar[float | None] = None

    corpus: str = "python_source"
    kind: Kind = "bos"
    count: int = 8
    scored: int = 32
    contexts: tuple[float, ...] = (1.25, 2.0)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigurationError(f"task {self.name!r}: kind {self.kind!r} is none of {', '.join(get_args(Kind))}")
        if self.count < 1 or self.scored < 1 or not self.contexts or min(self.contexts) < 0.5:
            raise ConfigurationError(
                f"task {self.name!r}: count {self.count} and scored {self.scored} must be 1 or more, and contexts "
                f"{self.contexts} 0.5 or more"
            )

    @property
    def identity(self) -> Identity:
        return resolve_corpus(self.corpus).identity

    def documents(self, encoder: Encoder, *, budget: int, items: int, seed: int) -> Iterator[Document]:
        contexts, near = sorted({round(share * budget) for share in self.contexts}), budget // 2
        length = contexts[-1] + self.scored
        texts = passages(self.corpus, encoder, length=length, items=items, seed=seed, task=self.name)
        false = self._false(encoder)
        for context in contexts:
            for item, text in enumerate(texts):
                begin, middle, end = -self.scored - context, -self.scored - near, -self.scored
                before = [*text[begin:middle], *false, *text[middle:end]]
                yield Document(item, context, decode(encoder, before), decode(encoder, text[end:]))

    def _false(self, encoder: Encoder) -> list[int]:
        """The tokens that stand in the way."""
        if self.kind == "none":
            return []
        if self.kind == "bos":
            if encoder.bos_token_id is None:
                raise InputError(f"task {self.name!r}: this model has no beginning-of-sequence token; choose another kind")
            return [encoder.bos_token_id] * self.count
        texts = (".", "\n") if self.kind == "delimiter" else (" the",)
        tokens = [encode(encoder, text, self.name)[-1] for text in texts]
        return [tokens[index % len(tokens)] for index in range(self.count)]
