"""Multi-turn: a dialogue in which every turn states a fact, and later turns ask about earlier ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from torch import Tensor

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError
from sinklab.registry import tasks
from sinklab.tasks._writer import Writer, digits, draw, encode
from sinklab.tasks.base import Sheet, Task

__all__ = ["MultiTurn"]

NAMES = (
    *("Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "June", "Kim", "Leo"),
    *("Mia", "Ned", "Ola", "Paul", "Rosa", "Sam", "Tom", "Una", "Vera", "Will", "Xena", "Zoe"),
)
STATED, NOTED = "User: {} has ", ".\nAssistant: I see.\n"
ASKED, END = "User: What does {} have?\nAssistant: {} has ", ".\n"
DIGITS = 2


@tasks.register("multi_turn")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTurn(Task):
    """User and assistant in turns; the user states a number of somebody, and now and then asks for one stated before.

    A name comes again only after all others, so what is asked for was stated once since. Unlike a question stream, where every
    turn can be answered from itself, the answer lies turns back. The dialogue goes on until some questions have been asked
    after more tokens than the budget holds. Roles are plain words: a model's own template of a chat is not used, so that
    one text serves all models.

    Args:
        every: turns from one question to the next.
        back: how many turns back the number was stated; one sheet each, 23 at most.
        shares: further distances, as shares of the budget, as far as 23 turns reach.
        questions: to be asked after the cache is full.
    """

    every: int = 3
    back: tuple[int, ...] = (1,)
    shares: tuple[float, ...] = (0.4, 0.7)
    questions: int = 3

    def __post_init__(self) -> None:
        if self.every < 1 or self.questions < 1 or any(not 1 <= back < len(NAMES) for back in self.back):
            raise ConfigurationError(
                f"task {self.name!r}: every {self.every} and questions {self.questions} must be 1 or more, and back "
                f"{self.back} from 1 to {len(NAMES) - 1}"
            )

    @property
    def identity(self) -> Identity:
        return Identity(source="generated turns of a dialogue", revision="1", licence="none")

    def sheets(self, encoder: Encoder, *, budget: int, rows: int, seed: int, bos: bool) -> Iterator[Sheet]:
        alphabet = digits(encoder, self.name)
        turn = sum(len(encode(encoder, text, self.name)) for text in (STATED.format("Anna"), NOTED)) + DIGITS
        question = sum(len(encode(encoder, text, self.name)) for text in (ASKED.format("Anna", "Anna"), END)) + DIGITS
        per_turn = turn + question / self.every
        swept = (round((share * budget - question) / per_turn) for share in self.shares)
        for back in sorted({*self.back, *(turns for turns in swept if 1 <= turns < len(NAMES))}):
            yield self._sheet(encoder, alphabet, back, budget, rows, random.Random(f"multi_turn {seed} {back}"), bos)

    def _sheet(
        self, encoder: Encoder, alphabet: Tensor, back: int, budget: int, rows: int, generator: random.Random, bos: bool
    ) -> Sheet:
        writer = Writer(encoder, rows, bos=bos, task=self.name)
        names = generator.sample(NAMES, len(NAMES))
        stated: list[tuple[int, str, Tensor]] = []
        asked = 0
        while asked < self.questions:
            name, number = names[len(stated) % len(names)], draw(alphabet, rows, DIGITS, generator)
            begin = writer.text(STATED.format(name))
            writer.put(number)
            writer.text(NOTED)
            stated.append((begin, name, number))
            if len(stated) % self.every == 0 and len(stated) > back:
                fact, name, number = stated[-1 - back]
                writer.text(ASKED.format(name, name))
                asked += writer.ask(number, alphabet, fact).start >= budget + 2
                writer.text(END)
        return writer.sheet()
