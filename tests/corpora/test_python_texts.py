"""Python's own texts: source and manual."""

import dataclasses
import importlib.metadata
import platform
import sysconfig
from pathlib import Path

import pytest
import torch

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.corpora.python_manual import PythonManual
from sinklab.corpora.python_source import PythonSource
from sinklab.errors import InputError
from sinklab.models.drawing import default_corpus
from sinklab.models.loading import load_model


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(vocab_size=len(tokenizer), bos_token_id=0, tokenizer=tokenizer, special_ids=frozenset({0, 1}))


def test_splits_do_not_meet_and_cover_everything():
    corpus = PythonSource()
    train, held_out = set(corpus.files("train")), set(corpus.files("held_out"))
    assert not train & held_out
    assert 0.03 < len(held_out) / len(train | held_out) < 0.07
    assert Path(sysconfig.get_paths()["stdlib"]) / "json" / "decoder.py" in train | held_out


def test_a_file_is_on_the_same_side_wherever_python_lives(monkeypatch, tmp_path):
    standard = tmp_path / "elsewhere" / "python3"
    (standard / "json").mkdir(parents=True)
    names = [f"json/module_{number}.py" for number in range(200)]
    for name in names:
        (standard / name).write_text("x = 1\n" * 50)
    monkeypatch.setattr(PythonSource, "packages", ())
    sides = []
    for base in (standard, tmp_path / "moved"):
        if base != standard:
            standard.rename(base)
        monkeypatch.setattr(sysconfig, "get_paths", lambda base=base: {"stdlib": str(base)})
        sides.append([path.relative_to(base).as_posix() for path in PythonSource().files("held_out")])
    assert sides[0] == sides[1]
    assert 0 < len(sides[0]) < 40


def test_samples_are_real_code_without_special_tokens(encoder):
    tokens = PythonSource().sample(encoder, seq_len=32, samples=20, seed=0, bos=True)
    assert tokens.shape == (20, 32)
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1:] > 1).all()
    text = "".join(encoder.tokenizer.decode(row[1:]) for row in tokens)
    assert text.isprintable() is False  # code has line breaks
    assert any(word in text for word in ("self", "def", "return", "import"))


def test_the_seed_decides(encoder):
    def draw(seed):
        return PythonSource().sample(encoder, seq_len=16, samples=3, seed=seed, bos=False)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_identity_names_the_versions_it_was_read_from():
    revision = resolve_corpus("python_source").identity.revision
    assert platform.python_version() in revision
    assert f"torch-{importlib.metadata.version('torch')}" in revision


def test_a_length_that_no_file_has_ends_with_counts_instead_of_searching_for_ever(encoder):
    with pytest.raises(InputError, match="it gives 0 of 2 samples of 5,000,000 tokens"):
        PythonSource().sample(encoder, seq_len=5_000_000, samples=2, seed=0, bos=False)


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
