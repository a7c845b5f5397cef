import pytest
import torch

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder, hash_tokens
from sinklab.errors import ConfigurationError

ENCODER = Encoder(vocab_size=50, bos_token_id=0, special_ids=frozenset({0, 1, 49}))


def test_every_ordinary_id_is_drawn_equally_often_and_no_special_one():
    tokens = resolve_corpus("random_tokens").sample(ENCODER, seq_len=500, samples=200, seed=3, bos=False)
    counts = torch.bincount(tokens.flatten(), minlength=50)
    assert counts[[0, 1, 49]].tolist() == [0, 0, 0]
    expected = 500 * 200 / 47
    # A binomial count has standard deviation < sqrt(expected) = 46; 47 counts stay within 5 of those but once in 50,000 seeds.
    assert (counts[2:49] - expected).abs().max() < 5 * expected**0.5


def test_bos_takes_position_zero_and_the_length_stays():
    tokens = resolve_corpus("random_tokens").sample(ENCODER, seq_len=16, samples=8, seed=0, bos=True)
    assert tokens.shape == (8, 16)
    assert tokens[:, 0].tolist() == [0] * 8
    assert (tokens[:, 1:] > 1).all()


def test_the_seed_decides():
    def draw(seed):
        return hash_tokens(resolve_corpus("random_tokens").sample(ENCODER, seq_len=9, samples=4, seed=seed, bos=False))

    assert draw(0) == draw(0) != draw(1)


def test_fewer_samples_are_the_first_ones():
    corpus = resolve_corpus("random_tokens")
    many = corpus.sample(ENCODER, seq_len=9, samples=8, seed=0, bos=False)
    assert torch.equal(corpus.sample(ENCODER, seq_len=9, samples=3, seed=0, bos=False), many[:3])


@pytest.mark.parametrize(("seq_len", "samples"), [(1, 5), (64, 0)])
def test_lengths_that_make_no_sample_are_refused_with_both_numbers(seq_len, samples):
    with pytest.raises(ConfigurationError, match=f"got {seq_len} and {samples}"):
        resolve_corpus("random_tokens").sample(ENCODER, seq_len=seq_len, samples=samples, seed=0, bos=False)


def test_a_repeated_token_is_an_ordinary_one_and_another_in_each_sample():
    encoder = Encoder(vocab_size=1000, bos_token_id=0, special_ids=frozenset({0, 1}))
    tokens = resolve_corpus("repeated_token").sample(encoder, seq_len=32, samples=40, seed=0, bos=True)
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1:] == tokens[:, 1:2]).all()
    assert tokens[:, 1].min() > 1
    assert len(set(tokens[:, 1].tolist())) > 30
