"""Every task keeps its contract, which can be broken; documents read back; what a task says when it cannot be made."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from tests.conftest import make_tokenizer

from sinklab.corpora.base import Encoder, Identity
from sinklab.errors import ConfigurationError, ContractError, InputError
from sinklab.registry import tasks
from sinklab.tasks._writing import distances, repeated
from sinklab.tasks.base import Document, Task
from sinklab.tasks.harmful_actions import ACTIONS
from sinklab.tasks.true_statements import PAIRS
from sinklab.testing import check_task


@pytest.fixture(scope="module")
def encoder():
    return Encoder(vocab_size=300, bos_token_id=0, tokenizer=make_tokenizer())


def documents(name, encoder, budget=200, items=3, seed=0, **settings):
    return list(tasks[name](**settings).documents(encoder, budget=budget, items=items, seed=seed))


@pytest.mark.parametrize("name", list(tasks))
def test_contract(name):
    check_task(tasks[name])


def test_a_key_stands_as_far_back_as_its_place_says(encoder):
    """A piece more or less where two texts meet is all that an encoding of the whole may differ by."""
    for document in documents("passkey", encoder, distances=(0.9, 1.5)):
        (key,) = re.findall(r"The pass key is( \d{5})\. Remember it\.", document.context)
        assert key == document.answer
        assert document.context[document.fact :].startswith(f"{key}. Remember it.\n")
        told = len(encoder.encode(document.context[document.fact :] + document.answer)) - 2
        assert abs(told - document.place) <= 3
        assert abs(len(encoder.encode(document.context)) - 400) <= 20  # two budgets
    assert {document.place for document in documents("passkey", encoder, distances=(0.9, 1.5))} >= {180, 300}


def test_lines_and_their_questions(encoder):
    """The asked label is that of the line so many lines back, and the answer its content."""
    for document in documents("line_lookup", encoder, budget=100, every=3, back=(4,), shares=()):
        written, asked = [], 0
        for line in (document.context + document.answer).splitlines():
            label, content = re.search(r"line (\d{3}): REGISTER_CONTENT is (\d{4})$", line).groups()
            if line.startswith("Recall "):
                assert (label, content) == written[-1 - 4]
                assert len(written) % 3 == 0
                asked += 1
            else:
                written.append((label, content))
        assert asked >= 1
        assert f" {content}" == document.answer
        assert set(document.wrong) <= {f" {content}" for _, content in written}
        assert document.context[document.fact :].startswith(f"line {label}: REGISTER_CONTENT is{document.answer}\n")
        assert len(encoder.encode(document.context)) >= 102


@pytest.mark.parametrize("back", [1, 5])
def test_the_answer_of_a_dialogue_was_stated_turns_ago_and_once_since(encoder, back):
    for document in documents("multi_turn", encoder, back=(back,), shares=()):
        stated = re.findall(r"User: (\w+) has (\d\d)\.", document.context)
        assert document.context.endswith(f"User: What does {stated[-1 - back][0]} have?\nAssistant: {stated[-1 - back][0]} has")
        assert document.answer == f" {stated[-1 - back][1]}"
        assert [name for name, _ in stated[-1 - back :]].count(stated[-1 - back][0]) == 1


def test_long_text_scores_the_same_text_after_every_context(encoder):
    drawn = documents("long_text", encoder, budget=40, scored=5, contexts=(0.1, 1, 3))
    assert [document.place for document in drawn] == [4] * 3 + [40] * 3 + [120] * 3
    for item in range(3):
        short, middle, long = drawn[item::3]
        assert short.answer == middle.answer == long.answer
        assert long.context.endswith(middle.context)
        assert middle.context.endswith(short.context)


def test_the_passage_is_the_same_whatever_stands_in_it(encoder):
    """Without the eight tokens half a budget before the answer, the texts of all kinds are equal."""
    plain = documents("false_sinks", encoder, kind="none")
    full_stop, line_break, the = (encoder.tokenizer.decode(encoder.encode(text)[-1:]) for text in (".", "\n", " the"))
    kinds = {"bos": encoder.tokenizer.bos_token * 8, "delimiter": (full_stop + line_break) * 4, "repeated": the * 8}
    for kind, false in kinds.items():
        for document, clean in zip(documents("false_sinks", encoder, kind=kind), plain, strict=True):
            head, found, tail = document.context.rpartition(false)
            assert found
            assert head + tail == clean.context
            assert abs(len(encoder.encode(tail)) - 100) <= 2
            assert (document.place, document.answer) == (clean.place, clean.answer)


@pytest.mark.parametrize("name", ["true_statements", "harmful_actions"])
def test_each_word_of_a_pair_is_right_once(encoder, name):
    drawn = documents(name, encoder, items=8)
    for item in range(8):
        first, second = (document for document in drawn if document.item == item)
        assert {first.answer, second.answer} == {first.answer, *first.wrong} == {second.answer, *second.wrong}
        assert first.place < second.place
    assert len({pair.first for pair in PAIRS}) == len(PAIRS) == len({harmful for harmful, _ in ACTIONS}) == len(ACTIONS) == 64


def test_lengths_in_tokens(encoder):
    assert distances((0.5, 1.5), 100, 30, "mine") == [30, 50, 150]
    assert distances((0.1,), 100, 30, "mine") == [30]
    text = repeated(encoder, "one two. ", 50, "mine")
    assert text.endswith("one two. ")
    assert len(encoder.encode(text)) == 50


def test_what_a_task_says_when_it_cannot_be_made(encoder, tmp_path):
    bare = Encoder(vocab_size=64, bos_token_id=0)
    for name in tasks:
        with pytest.raises(InputError, match=rf"task '{name}' .* this model has no tokenizer; give a model directory"):
            documents(name, bare)
    with pytest.raises(
        ConfigurationError, match=r"fact and question take \d+ tokens .* window of 12 never .* choose a `window`"
    ):
        documents("passkey", encoder, budget=12)
    with pytest.raises(ConfigurationError, match=r"1000 labels, and a question 2000 lines back .* takes 2010"):
        documents("line_lookup", encoder, back=(2000,), shares=())
    with pytest.raises(ConfigurationError, match="64 pairs of statements, and `items` 65 asks for more"):
        documents("true_statements", encoder, items=65)
    no_bos = Encoder(vocab_size=300, tokenizer=make_tokenizer())
    with pytest.raises(InputError, match="task 'false_sinks': this model has no beginning-of-sequence token; choose another"):
        documents("false_sinks", no_bos)
    (tmp_path / "short.txt").write_text("one two three\n\nfour five six")
    with pytest.raises(InputError, match=r"task 'long_text': .* too short: it gives 0 of 3 passages of 432 tokens"):
        documents("long_text", encoder, budget=100, corpus=str(tmp_path / "short.txt"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "passkey", "depth": 3}, "task 'passkey' has no setting 'depth'; it has length, distances"),
        ({"name": "long_text", "scored": 0}, "task 'long_text': scored 0 and contexts"),
        ({"name": "line_lookup", "every": 0}, "task 'line_lookup': every 0"),
        ({"name": "multi_turn", "back": [24]}, "task 'multi_turn': every 3 must be 1 or more, and back"),
        (
            {"name": "false_sinks", "kind": "noise"},
            "task 'false_sinks': kind = 'noise': input should be 'bos', 'delimiter', 'repeated' or 'none'",
        ),
        ({"name": "true_statements", "lengths": [3.0, 2.0]}, "task 'true_statements': lengths"),
    ],
)
def test_settings_that_cannot_be(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        tasks.make(spec)


# --- tasks that break the contract


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """One word of two, told and asked; what subclasses do wrong is theirs."""

    name: ClassVar[str] = "recall"
    chance: ClassVar[float | None] = 0.5
    gap: int = 10

    @property
    def identity(self):
        return Identity("words", "1", "none")

    def documents(self, encoder, *, budget, items, seed):
        if encoder.tokenizer is None:
            raise InputError("task 'recall' needs a tokenizer")
        for item in range(items):
            words = [" yes", " no"]
            right = words.pop((seed + item) % 2)
            front = "so it goes. " * budget + "It is"
            yield Document(item, self.gap, f"{front}{right}. {'x' * self.gap} It is", right, tuple(words), fact=len(front))


def changed(**changes):
    """Documents of :class:`Recall`, each with these fields."""

    def drawn(self, encoder, **options):
        return (dataclasses.replace(document, **changes) for document in Recall.documents(self, encoder, **options))

    return drawn


class IgnoresTheSeed(Recall):
    def documents(self, encoder, *, seed, **options):
        return super().documents(encoder, seed=0, **options)


class WrongFact(Recall):
    def documents(self, encoder, **options):
        for document in super().documents(encoder, **options):
            yield dataclasses.replace(document, fact=len(document.context) - 1)


class NoChance(Recall):
    chance: ClassVar[float | None] = None


class WrongChance(Recall):
    chance: ClassVar[float | None] = 0.25


class TwiceTheSame(Recall):
    documents = changed(answer=" yes", wrong=(" yes",), fact=None)


class OneItem(Recall):
    documents = changed(item=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TooFar(Recall):
    gap: int = 4000


def broken(cls, monkeypatch):
    monkeypatch.setitem(tasks._objects, "recall", cls)
    monkeypatch.setattr(type(tasks), "_require", lambda self, name: None)
    return cls


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (IgnoresTheSeed, "check 'seed': expected other documents from another seed, got the same"),
        (WrongFact, "check 'fact': expected the answer"),
        (WrongChance, "check 'chance': expected 0.5 of 2, got 0.25"),
        (NoChance, "check 'declaration': expected a chance for choices"),
        (TooFar, "check 'budget': expected a question behind 96 tokens whose fact a window of 96 holds, got none"),
        (TwiceTheSame, "check 'wrong': expected answers that differ"),
        (OneItem, "check 'items': expected every item at place 10, got [0]"),
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
