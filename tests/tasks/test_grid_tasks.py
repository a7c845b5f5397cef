"""False sinks, dialogues, facts in two steps, and pairs of statements: their texts read back, and what they refuse."""

from __future__ import annotations

import re

import pytest
import torch
from tests.conftest import make_tokenizer

from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import tasks
from sinklab.tasks._statements import read_statement
from sinklab.tasks.harmful_actions import ACTIONS
from sinklab.tasks.true_statements import PAIRS


@pytest.fixture(scope="module")
def encoder():
    return Encoder(vocab_size=300, bos_token_id=0, tokenizer=make_tokenizer())


def sheets(task, encoder, *, budget=200, rows=3, seed=0):
    return list(task.sheets(encoder, budget=budget, rows=rows, seed=seed, bos=True))


class TestFalseSinks:
    def test_the_passage_is_the_same_whatever_stands_in_it(self, encoder):
        """Without the eight columns half a budget before the answer, the texts of all kinds are equal."""
        plain = sheets(tasks["false_sinks"](kind="none"), encoder)
        delimiters = [encoder.encode(text)[-1] for text in (".", "\n")]
        false = {"bos": [0] * 8, "delimiter": delimiters * 4, "repeated": encoder.encode(" the")[-1:] * 8}
        for kind, expected in false.items():
            for sheet, clean in zip(sheets(tasks["false_sinks"](kind=kind), encoder), plain, strict=True):
                (question,) = sheet.questions
                begin = question.start - 100 - 8
                assert sheet.tokens[:, begin : begin + 8].tolist() == [expected] * 3
                assert torch.equal(torch.cat([sheet.tokens[:, :begin], sheet.tokens[:, begin + 8 :]], dim=1), clean.tokens)
                assert sheet.at == clean.at

    def test_refusals(self, encoder):
        with pytest.raises(
            ConfigurationError, match="task 'false_sinks': kind 'noise' is none of bos, delimiter, repeated, none"
        ):
            tasks["false_sinks"](kind="noise")
        with pytest.raises(ConfigurationError, match="task 'false_sinks': count 0 and scored 32"):
            tasks["false_sinks"](count=0)
        bare = Encoder(vocab_size=300, tokenizer=make_tokenizer())
        with pytest.raises(
            InputError, match="task 'false_sinks': this model has no beginning-of-sequence token; choose another"
        ):
            list(tasks["false_sinks"]().sheets(bare, budget=100, rows=2, seed=0, bos=False))


class TestMultiTurn:
    def test_the_answer_was_stated_turns_ago_and_once_since(self, encoder):
        for back in (1, 5):
            (sheet,) = sheets(tasks["multi_turn"](back=(back,), shares=()), encoder)
            for row in sheet.tokens:
                stated = []
                for line in encoder.tokenizer.decode(row, skip_special_tokens=True).splitlines():
                    if statement := re.fullmatch(r"User: (\w+) has (\d\d)\.", line):
                        stated.append(statement.groups())
                    elif answer := re.fullmatch(r"Assistant: (\w+) has (\d\d)\.?", line):
                        assert stated[-1 - back] == answer.groups()
                        assert answer[1] not in dict(stated[-back:])
            assert sum(question.start >= 202 for question in sheet.questions) == 3

    def test_refusals(self):
        with pytest.raises(ConfigurationError, match=r"task 'multi_turn': .* back \(24,\) from 1 to 23"):
            tasks["multi_turn"](back=(24,))


class TestStatedFacts:
    def test_two_facts_give_the_answer_and_no_room_is_stated_twice(self, encoder):
        for sheet in sheets(tasks["stated_facts"](), encoder, rows=8):
            (question,) = sheet.questions
            rooms = set()
            for row in sheet.tokens:
                text = encoder.tokenizer.decode(row, skip_special_tokens=True)
                has = dict(re.findall(r"(Anna|Ben|Sam|Tom) has the (\w+)\.", text))
                place = dict(re.findall(r"The (\w+) is in room (\d)\.", text))
                assert sorted(place.values()) == ["1", "2", "3", "4"]
                assert text.endswith(f"Where is what Anna has? In room {place[has['Anna']]}")
                # What is needed begins at the line of the person.
                needed = encoder.tokenizer.decode(row[question.stop - 2 - question.distance :])
                assert needed.startswith("Anna has the ")
                rooms.add(text[-1])
            assert len(rooms) > 1

    def test_copying_the_room_that_is_stated_at_any_place_is_right_in_a_quarter(self, encoder):
        for sheet in sheets(tasks["stated_facts"](), encoder, rows=200):
            texts = [encoder.tokenizer.decode(row, skip_special_tokens=True) for row in sheet.tokens]
            stated = [re.findall(r"The \w+ is in room (\d)\.", text) for text in texts]
            for place in range(4):
                right = sum(rooms[place] == text[-1] for rooms, text in zip(stated, texts, strict=True))
                assert 25 <= right <= 75  # 50 give or take four standard errors of 6.1; with one order for all it was 0 or 200


@pytest.mark.parametrize("name", ["true_statements", "harmful_actions"])
class TestStatements:
    def test_each_word_is_right_once_and_wrong_once(self, encoder, name):
        """The two sheets of a row are one pair: whatever word a model likes better, it is right in exactly half of them."""
        first, second = sheets(tasks[name](), encoder, rows=64)
        assert first.at < second.at
        alphabets, answers = [], []
        for sheet in (first, second):
            (question,) = sheet.questions
            assert question.alphabet.shape == (64, 2)
            alphabets.append(question.alphabet)
            answers.append(sheet.tokens[:, question.start])
        assert torch.equal(*alphabets)
        assert (answers[0] != answers[1]).all()
        for liked in alphabets[0].unbind(dim=1):
            hits = torch.stack([answer == liked for answer in answers]).double()
            assert hits.mean(dim=0).tolist() == [0.5] * 64

    def test_every_pair_is_asked_once(self, encoder, name):
        texts = [encoder.tokenizer.decode(row) for sheet in sheets(tasks[name](), encoder, rows=64) for row in sheet.tokens]
        beginnings = [text.rsplit("\n", 1)[1] for text in texts]
        assert len(set(beginnings)) == 128

    def test_more_items_than_there_are(self, encoder, name):
        with pytest.raises(ConfigurationError, match=f"task '{name}' has 64 pairs of statements, and `items` 65 asks for more"):
            sheets(tasks[name](), encoder, rows=65)
        with pytest.raises(ConfigurationError, match=rf"task '{name}': lengths \(2.0, 1.0\) must be two numbers above 0"):
            tasks[name](lengths=(2.0, 1.0))


def test_the_pairs_are_well_formed():
    assert len(PAIRS) == len(ACTIONS) == 64
    assert all(pair.first != pair.second and pair.first_word != pair.second_word for pair in PAIRS)
    assert all(word.startswith(" ") for pair in PAIRS for word in pair[2:])
    beginnings = [beginning for pair in PAIRS for beginning in pair[:2]] + [action for pair in ACTIONS for action in pair]
    assert len(set(beginnings)) == 256


def test_ends_part_at_their_first_different_token(encoder):
    statement = read_statement(encoder, "They are", " warm", " warning", "mine")
    text = encoder.tokenizer.decode(statement.beginning)
    assert text.startswith("\nThey are")
    assert statement.right != statement.wrong
    with pytest.raises(InputError, match="this tokenizer does not tell 'They are one' from 'They are one two'"):
        read_statement(encoder, "They are", " one", " one two", "mine")
