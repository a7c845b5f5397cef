"""Verdicts on checkpoints that others trained; they are no part of the project, and a variable says where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sinklab.corpora import resolve_corpus
from sinklab.corpora._reading import read_samples
from sinklab.corpora.text_file import TextFile
from sinklab.models.loading import load_model
from sinklab.sinks import find_sinks


def real(name: str) -> Path:
    """The directory of a checkpoint; skips the test where it is not there."""
    folder = os.environ.get("SINKLAB_REAL_MODELS")
    if not folder:
        pytest.skip("SINKLAB_REAL_MODELS does not say where the checkpoints of others are")
    path = Path(folder, name)
    if not path.is_dir():
        pytest.skip(f"SINKLAB_REAL_MODELS has no {name}")
    return path


@pytest.mark.parametrize("bos", [True, False])
def test_a_llama_has_its_sink_at_bos_and_none_without(bos):
    loaded = load_model(str(real("tiny1m")))
    tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=64, samples=16, seed=0, bos=bos)
    found = find_sinks(loaded.model, tokens, decode=lambda token: loaded.tokenizer.decode([token]))
    if not bos:
        assert found.main is None
        return
    assert (found.main.position, found.main.text, found.main.token_share) == (0, "<s>", 1.0)
    assert 2 <= found.main.sinking < len(found.heads) == 8
    assert found.positions == [0]
    assert found.followed == found.silent == ()


def test_a_tokenizer_of_chemistry_reads_reactions_and_no_python():
    path = real("rxnmapper-albert")
    encoder = load_model(str(path)).encoder
    arguments = {"seq_len": 32, "samples": 8, "seed": 0, "bos": True}
    own = read_samples(TextFile(path / "reactions.txt"), encoder, **arguments)
    other = read_samples(resolve_corpus("python_source"), encoder, **arguments)
    assert own.unread_share < 0.01
    assert own.warning == ""
    assert other.unread_share > 0.5
    assert other.warning
