from __future__ import annotations

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder

ENCODER = Encoder(vocab_size=1000, bos_token_id=0, special_ids=frozenset({0, 1}))


def test_each_sample_is_one_ordinary_token():
    tokens = resolve_corpus("repeated_token").sample(ENCODER, seq_len=32, samples=40, seed=0, bos=False)
    assert tokens.shape == (40, 32)
    assert (tokens == tokens[:, :1]).all()
    assert tokens.min() > 1


def test_samples_differ():
    tokens = resolve_corpus("repeated_token").sample(ENCODER, seq_len=8, samples=40, seed=0, bos=False)
    assert len(set(tokens[:, 0].tolist())) > 30
