"""Prose from the help of the interpreter, and which models read it if nothing is said."""

import dataclasses

import pytest

from sinklab.corpora.python_manual import PythonManual
from sinklab.corpora.python_source import PythonSource
from sinklab.errors import InputError
from sinklab.models.drawing import default_corpus
from sinklab.models.loading import load_model


def test_passages_are_paragraphs_of_prose_and_go_round_the_manual():
    manual = PythonManual()
    first, second = (next(manual.passages(seed)) for seed in (0, 1))
    paragraphs = first.split("\n\n")
    assert first != second
    assert sorted(paragraphs) == sorted(second.split("\n\n"))
    assert len(set(paragraphs)) == len(paragraphs) > 300
    assert all(one[0].isupper() and one.endswith(".") and "\n" not in one for one in paragraphs)
    assert sum(one.count("::=") for one in paragraphs) == 0


def test_a_model_that_was_made_to_talk_reads_it(checkpoint, monkeypatch):
    loaded = load_model(str(checkpoint))
    assert isinstance(default_corpus(loaded), PythonSource)
    loaded.tokenizer.chat_template = "{{ messages }}"
    assert isinstance(default_corpus(dataclasses.replace(loaded)), PythonManual)
    monkeypatch.setattr(PythonManual, "topics", "pydoc_data.nothing")
    assert isinstance(default_corpus(loaded), PythonSource)
    with pytest.raises(InputError, match="give a text file"):
        next(PythonManual().passages(0))
