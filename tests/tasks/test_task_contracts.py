"""Every task keeps its contract; the contract can be broken; layouts by hand; and what a task says when it cannot be made."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.conftest import make_tokenizer

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError, ContractError, InputError, UnknownNameError
from sinklab.registry import tasks
from sinklab.tasks._writer import Writer, digits, distances
from sinklab.tasks.base import Question, Sheet, Task
from sinklab.testing import check_task


@pytest.fixture(scope="module")
def encoder():
    return Encoder(vocab_size=300, bos_token_id=0, tokenizer=make_tokenizer())


@pytest.mark.parametrize("name", list(tasks))
def test_contract(name):
    check_task(tasks[name])


@pytest.mark.parametrize("name", ["passkey", "needle"])
def test_every_sheet_has_the_same_length_and_its_own_distance(name, encoder):
    budget = 200
    sheets = list(tasks[name](distances=(0.9, 1.5)).sheets(encoder, budget=budget, rows=2, seed=0, bos=True))
    assert len({sheet.tokens.shape for sheet in sheets}) == 1
    assert sheets[0].tokens.shape[1] == 4 * budget
    assert [sheet.at for sheet in sheets][1:] == [180, 300]
    for sheet in sheets:
        (question,) = sheet.questions
        assert question.stop == sheet.tokens.shape[1]
        fact = question.stop - 2 - question.distance
        assert torch.equal(sheet.tokens[:, fact : fact + 5], sheet.tokens[:, question.start :])


def test_needle_stands_in_real_text(encoder):
    sheet = next(iter(tasks["needle"]().sheets(encoder, budget=200, rows=1, seed=3, bos=False)))
    text = encoder.tokenizer.decode(sheet.tokens[0])
    number = re.search(r"The special magic number of Lisbon is (\d{5})\.", text)
    assert number is not None
    assert text.endswith(f"What is the special magic number of Lisbon? The special magic number of Lisbon is {number[1]}")


def test_lines_and_their_questions(encoder):
    """The asked label is that of the line so many lines back, and the answer its content."""
    task = tasks["line_lookup"](every=3, back=(4,), shares=(), questions=2)
    (sheet,) = task.sheets(encoder, budget=100, rows=2, seed=0, bos=True)
    for row in sheet.tokens:
        written, asked = [], 0
        for line in encoder.tokenizer.decode(row, skip_special_tokens=True).splitlines():
            label, content = re.search(r"line (\d{3}): REGISTER_CONTENT is (\d{4})$", line).groups()
            if line.startswith("Recall "):
                assert (label, content) == written[-1 - 4]
                assert len(written) % 3 == 0
                asked += 1
            else:
                written.append((label, content))
        assert asked == len(sheet.questions)
    assert sum(question.start >= 102 for question in sheet.questions) == 2


def test_turns_can_be_answered_from_themselves(encoder):
    (sheet,) = tasks["question_stream"](length=3).sheets(encoder, budget=150, rows=1, seed=0, bos=True)
    turns = encoder.tokenizer.decode(sheet.tokens[0], skip_special_tokens=True).split("\nQ: ")
    assert len(turns) == len(sheet.questions) + 1
    for before, after in pairwise(turns):
        name, number = re.search(r"A: (\w+) has (\d\d)\.", after).groups()
        assert f"{name} has {number}." in before


def test_long_text_scores_the_same_tokens_after_every_context(encoder):
    sheets = list(tasks["long_text"](scored=5, contexts=(0.1, 1, 3)).sheets(encoder, budget=40, rows=3, seed=0, bos=True))
    assert [sheet.at for sheet in sheets] == [4, 40, 120]
    for sheet in sheets:
        assert sheet.tokens.shape == (3, 1 + sheet.at + 5)
        assert torch.equal(sheet.tokens[:, -9:], sheets[0].tokens[:, -9:])


def test_distance_counts_from_the_query_of_the_last_answer_token(encoder):
    writer = Writer(encoder, 1, bos=False, task="mine")
    fact = writer.put([7])
    writer.put([1, 2, 3])
    question = writer.ask(torch.tensor([[7, 8]]), None, fact)
    # Columns 0…5; token 8 in column 5 is predicted at column 4, which must see column 0.
    assert (question.start, question.stop, question.distance) == (4, 6, 4)


def test_digits_are_single_tokens(encoder):
    ids = digits(encoder, "mine")
    assert [encoder.tokenizer.decode([token]) for token in ids] == list("0123456789")


class NoDigits:
    """A tokenizer that gives every text the same token."""

    def __call__(self, text, **_):
        return {"input_ids": [5]}


def test_what_a_task_says_when_it_cannot_be_made(encoder):
    def sheets(task, encoder=encoder, budget=100):
        return list(task.sheets(encoder, budget=budget, rows=2, seed=0, bos=True))

    bare = Encoder(vocab_size=64, bos_token_id=0)
    for name in tasks:
        with pytest.raises(InputError, match=rf"task '{name}' .* this model has no tokenizer; give a model directory"):
            sheets(tasks[name](), bare)
    with pytest.raises(InputError, match="task 'passkey' asks for digits, and this tokenizer does not give each"):
        sheets(tasks["passkey"](), Encoder(vocab_size=64, bos_token_id=0, tokenizer=NoDigits()))
    with pytest.raises(
        ConfigurationError, match=r"fact and question take \d+ tokens .* window of 12 never .* choose a `window`"
    ):
        sheets(tasks["passkey"](), budget=12)
    with pytest.raises(ConfigurationError, match=r"1000 labels, which are used up before 2 questions 2000 lines back"):
        sheets(tasks["line_lookup"](back=(2000,), shares=()))
    with pytest.raises(ConfigurationError, match="task 'needle' has no setting 'depth'; it has corpus, length, distances"):
        tasks.make({"name": "needle", "depth": 3})
    with pytest.raises(UnknownNameError, match=r"no task is called 'nedle'\. Did you mean 'needle'"):
        tasks.make({"name": "nedle"})
    with pytest.raises(ConfigurationError, match="task 'question_stream': length 1 must be above 1"):
        tasks["question_stream"](length=1)
    with pytest.raises(ConfigurationError, match="task 'long_text': scored 0 and contexts"):
        tasks["long_text"](scored=0)
    with pytest.raises(ConfigurationError, match="task 'line_lookup': every 0"):
        tasks["line_lookup"](every=0)


def test_a_text_that_is_too_short(encoder, tmp_path):
    (tmp_path / "short.txt").write_text("one two three\n\nfour five six")
    task = tasks["long_text"](corpus=str(tmp_path / "short.txt"))
    with pytest.raises(
        InputError, match=r"task 'long_text': .* too short: it gives 0 of 2 passages of 432 tokens; lower `items` or `window`"
    ):
        list(task.sheets(encoder, budget=100, rows=2, seed=0, bos=True))


def test_distances():
    assert distances((0.5, 1.5), 100, 30, "mine") == [30, 50, 150]
    assert distances((0.1,), 100, 30, "mine") == [30]


# --- tasks that break the contract


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """One digit, told and asked; what subclasses do wrong is theirs."""

    name: ClassVar[str] = "recall"
    claimed: ClassVar[int] = 0
    gap: int = 10

    @property
    def identity(self):
        return Identity("digits", "1", "none")

    def sheets(self, encoder, *, budget, rows, seed, bos):
        alphabet = digits(encoder, "recall")
        generator = torch.Generator().manual_seed(seed)
        digit = alphabet[torch.randint(10, (rows, 1), generator=generator)]
        writer = Writer(encoder, rows, bos=bos, task="recall")
        writer.put([20] * 2 * budget)
        fact = writer.put(digit)
        writer.put([20] * self.gap)
        writer.ask(digit, alphabet, fact - self.claimed)
        yield writer.sheet()


class Unseeded(Recall):
    def sheets(self, encoder, *, seed, **options):
        return super().sheets(encoder, seed=torch.seed(), **options)


class IgnoresTheSeed(Recall):
    def sheets(self, encoder, *, seed, **options):
        return super().sheets(encoder, seed=0, **options)


class WrongFact(Recall):
    claimed: ClassVar[int] = -3


class WrongChance(Recall):
    chance: ClassVar[float | None] = 0.5


class NoChance(Recall):
    chance: ClassVar[float | None] = None


class AlwaysBos(Recall):
    def sheets(self, encoder, *, bos, **options):
        return super().sheets(encoder, bos=True, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TooFar(Recall):
    gap: int = 1000


class Overlapping(Recall):
    def sheets(self, encoder, **options):
        for sheet in super().sheets(encoder, **options):
            (question,) = sheet.questions
            yield Sheet(sheet.tokens, (question, question), sheet.at)


class OtherSymbols(Recall):
    def sheets(self, encoder, **options):
        for sheet in super().sheets(encoder, **options):
            (question,) = sheet.questions
            yield Sheet(
                sheet.tokens, (Question(question.start, question.stop, question.distance, torch.arange(20, 30)),), sheet.at
            )


def broken(cls, monkeypatch):
    monkeypatch.setitem(tasks._objects, "recall", cls)
    monkeypatch.setattr(type(tasks), "_require", lambda self, name: None)
    return cls


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Unseeded, "check 'seed': expected the same texts from the same seed, got others"),
        (IgnoresTheSeed, "check 'seed': expected other texts from another seed, got the same"),
        (WrongFact, "check 'distance': expected the answer within the"),
        (WrongChance, "check 'chance': expected 0.1 of 10, got 0.5"),
        (NoChance, "check 'declaration': expected a chance for choices"),
        (AlwaysBos, "check 'bos': expected no token in front with bos=False, got the BOS token"),
        (TooFar, "check 'budget': expected a question behind 96 tokens whose fact a window of 96 holds, got none"),
        (Overlapping, "check 'questions': expected columns in order, got (204, 205)"),
        (OtherSymbols, "check 'alphabet': expected answers among its symbols"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_task_that_breaks_its_contract(cls, message, monkeypatch, encoder):
    cls = broken(cls, monkeypatch)
    with pytest.raises(ContractError, match=re.escape("task 'recall' breaks its contract, " + message)):
        check_task(cls, encoder=encoder)


def test_the_task_that_the_broken_ones_are_made_of_passes(monkeypatch, encoder):
    check_task(broken(Recall, monkeypatch), encoder=encoder)


def test_the_task_of_the_documents_keeps_the_contract(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "scores.md"
    (source,) = re.findall(r"^```python\n(# src/sinklab/tasks/key_value\.py\n.*?)^```", page.read_text(), re.M | re.S)
    (tmp_path / "key_value.py").write_text(source)
    spec = importlib.util.spec_from_file_location("sinklab.tasks.key_value", tmp_path / "key_value.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    try:
        check_task(module.KeyValue)
    finally:
        del tasks._objects["key_value"]
