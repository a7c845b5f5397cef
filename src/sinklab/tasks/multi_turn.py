"""Multi-turn: a dialogue in which every turn states a fact, and later turns ask about earlier ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError
from sinklab.registry import tasks
from sinklab.tasks._writing import CHOICES, encode, placed
from sinklab.tasks.base import Document, Task

__all__ = ["MultiTurn"]

NAMES = (
    *("Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "June", "Kim", "Leo"),
    *("Mia", "Ned", "Ola", "Paul", "Rosa", "Sam", "Tom", "Una", "Vera", "Will", "Xena", "Zoe"),
)
STATED = "User: {} has {:02d}.\nAssistant: I see.\n"
ASKED, ANSWER, END = "User: What does {} have?\nAssistant: {} has", " {:02d}", ".\n"


@tasks.register("multi_turn")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTurn(Task):
    """User and assistant in turns; the user states a number of somebody, and now and then asks for one stated before.

    A name comes again only after all others, so what is asked for was stated once since. The last question of a document,
    behind more tokens than the budget holds, is the one that is scored: among that number and three others of the last turns.
    Documents of an item are one dialogue and differ in that question.
    Roles are plain words: a model's own template of a chat is not used, so that one text serves all models.

    Args:
        every: turns from one question to the next.
        back: how many turns back the number was stated; one document of an item each, 23 at most.
        shares: further distances, as shares of the budget, as far as 23 turns reach.
    """

    every: int = 3
    back: tuple[int, ...] = (1,)
    shares: tuple[float, ...] = (0.4, 0.7)

    def __post_init__(self) -> None:
        if self.every < 1 or any(not 1 <= back < len(NAMES) for back in self.back):
            raise ConfigurationError(
                f"task {self.name!r}: every {self.every} must be 1 or more, and back {self.back} from 1 to {len(NAMES) - 1}"
            )

    @property
    def identity(self) -> Identity:
        return Identity(source="generated turns of a dialogue", revision="3", licence="none")

    def documents(self, encoder: Encoder, *, budget: int, items: int, seed: int) -> Iterator[Document]:
        turn = len(encode(encoder, STATED.format("Anna", 42), self.name))
        question = len(encode(encoder, ASKED.format("Anna", "Anna") + ANSWER.format(42) + END, self.name))
        per_turn = turn + question / self.every
        swept = (round((share * budget - turn - question) / per_turn) for share in self.shares)
        filled = -(-(budget + 2) // turn)
        backs = sorted({*self.back, *(turns for turns in swept if 1 <= turns < len(NAMES))})
        turns = self.every * -(-max(filled, backs[-1] + 1, CHOICES) // self.every)
        drawn = [self._documents(item, backs, turns, random.Random(f"multi_turn {seed} {item}")) for item in range(items)]
        for of_back in zip(*drawn, strict=True):
            yield from placed(encoder, of_back)

    def _documents(self, item: int, backs: Sequence[int], turns: int, generator: random.Random) -> list[Document]:
        """One dialogue, with the last question as far back as each of these."""
        names, have = generator.sample(NAMES, len(NAMES)), [generator.randrange(100) for _ in range(turns)]
        text, begins = "", list[int]()
        for number in range(1, turns + 1):
            begins.append(len(text))
            text += STATED.format(names[(number - 1) % len(names)], have[number - 1])
            back = backs[number // self.every % len(backs)]
            if number % self.every == 0 and back < number < turns:
                asked = number - 1 - back
                name = names[asked % len(names)]
                text += ASKED.format(name, name) + ANSWER.format(have[asked]) + END
        documents = []
        for asked in (turns - 1 - back for back in backs):
            name = names[asked % len(names)]
            # Among numbers of the last turns, filled up with others where few of them differ.
            others = [number for number in dict.fromkeys((*reversed(have), *range(100))) if number != have[asked]]
            wrong = tuple(map(ANSWER.format, others[: CHOICES - 1]))
            context = text + ASKED.format(name, name)
            documents.append(Document(item, 0, context, ANSWER.format(have[asked]), wrong, fact=begins[asked]))
        return documents
