"""Stated facts: who has what, and where it is, in a long text; where is what somebody has? Two facts to combine."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder, Identity
from sinklab.registry import tasks
from sinklab.tasks._writer import Writer, digits, distances, encode, passages
from sinklab.tasks.base import Sheet, Task

__all__ = ["StatedFacts"]

NAMES, OBJECTS = ("Anna", "Ben", "Sam", "Tom"), ("cup", "hat", "key", "box")
HAS, PLACE, END = "{} has the {}.\n", "The {} is in room ", ".\n"
QUESTION = "\nWhere is what {} has? In room "


@tasks.register("stated_facts")
@dataclasses.dataclass(frozen=True, kw_only=True)
class StatedFacts(Task):
    """``Anna has the cup.``, three more such lines, ``The cup is in room 3.``, three more: in which room is what Anna has?

    The facts stand in real text, and the question asks for a room that is stated nowhere together with the name: two supporting
    facts, as in task 2 of bAbI (Weston et al. 2015, arXiv 1502.05698). Each of the four rooms is stated once, so a model that
    copies any room is right in a quarter of the cases.

    Args:
        corpus: the text around the facts: a name, a text file or a folder.
        length: tokens of a text, in budgets.
        distances: from the line that names the person to the end, as shares of the budget.
    """

    chance: ClassVar[float | None] = 0.25

    corpus: str = "python_source"
    length: float = 2.0
    distances: tuple[float, ...] = (0.9, 1.5)

    @property
    def identity(self) -> Identity:
        return resolve_corpus(self.corpus).identity

    def sheets(self, encoder: Encoder, *, budget: int, rows: int, seed: int, bos: bool) -> Iterator[Sheet]:
        rooms = digits(encoder, self.name)[1 : 1 + len(NAMES)]

        def size(text: str) -> int:
            return len(encode(encoder, text, self.name))

        asked = NAMES[0]
        owned = size(HAS.format(asked, OBJECTS[0]))
        places = sum(size(PLACE.format(thing)) + 1 + size(END) for thing in OBJECTS)
        # The line of the person that is asked for is the last of its kind: the nearest that the fact can be.
        least = max(owned, *(size(HAS.format(asked, thing)) for thing in OBJECTS)) + places + size(QUESTION.format(asked)) - 1
        chosen = distances(self.distances, budget, least, self.name)
        length = max(round(self.length * budget), chosen[-1] + 2 + bos + 4 * owned)
        texts = passages(self.corpus, encoder, length=length, rows=rows, seed=seed, task=self.name)
        for distance in chosen:
            generator = random.Random(f"stated_facts {seed} {distance}")
            things = generator.sample(OBJECTS, len(OBJECTS))
            room_of = [generator.sample(rooms.tolist(), len(rooms)) for _ in range(rows)]
            writer = Writer(encoder, rows, bos=bos, task=self.name)
            others = [HAS.format(name, thing) for name, thing in zip(NAMES[1:], things[1:], strict=True)]
            mine = HAS.format(asked, things[0])
            generator.shuffle(others)
            after = distance - (size(mine) + places + size(QUESTION.format(asked)) - 1)
            before = length - distance - 2 - bos - sum(map(size, others))
            writer.put(texts[:, :before])
            for line in others:
                writer.text(line)
            fact = writer.text(mine)
            # An order for each row, or copying the last room would be right in all of them or in none.
            writer.put(torch.tensor([_places(encoder, things, room, generator, self.name) for room in room_of]))
            writer.put(texts[:, before : before + after])
            writer.text(QUESTION.format(asked))
            writer.ask(torch.tensor([[room[0]] for room in room_of]), rooms, fact)
            yield writer.sheet()


def _places(encoder: Encoder, things: Sequence[str], rooms: Sequence[int], generator: random.Random, task: str) -> list[int]:
    """The lines that say in which room each thing is, in an order of their own: as many tokens in every order."""
    ids: list[int] = []
    for thing, room in generator.sample(list(zip(things, rooms, strict=True)), len(things)):
        ids += [*encode(encoder, PLACE.format(thing), task), room, *encode(encoder, END, task)]
    return ids
