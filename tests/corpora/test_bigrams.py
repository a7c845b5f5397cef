from itertools import islice, pairwise

import numpy as np
import pytest

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder, hash_tokens
from sinklab.corpora.bigram_backcopy import CHARACTERS, TRIGGERS
from sinklab.corpora.bigrams import LAW_SEED
from sinklab.errors import ConfigurationError, InputError

LENGTH = 64


class Characters:
    """A tokenizer of the made-up language: a letter or a trigger is a token."""

    def __call__(self, text: str, **keywords: object) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **keywords: object) -> list[int]:
        return [(CHARACTERS + TRIGGERS).index(character) for character in text]


ENCODER = Encoder(vocab_size=27, tokenizer=Characters())


def rows_of(corpus: str, number: int, seed: int = 0, encoder: Encoder = ENCODER) -> np.ndarray:
    return np.array(list(islice(resolve_corpus(corpus).rows(encoder, LENGTH, seed), number)))


def pairs_of(rows: np.ndarray) -> np.ndarray:
    counts = np.zeros((27, 27))
    np.add.at(counts, (rows[:, :-1], rows[:, 1:]), 1)
    return counts


def test_pairs_are_as_frequent_as_in_the_text():
    drawn = pairs_of(rows_of(f"bigrams:of=bigram_backcopy,tokens={LENGTH * 500}", 500))
    text = pairs_of(rows_of("bigram_backcopy", 500, seed=LAW_SEED))
    law = text / text.sum(axis=1, keepdims=True)
    assert (text.sum(axis=1) > 0).all(), "every token has a successor, so none is drawn anew"
    assert not (drawn[text == 0] > 0).any()
    expected = drawn.sum(axis=1, keepdims=True) * law
    # Binomial counts, standard deviation sqrt(n p (1 - p)). 500 counts lie within 5 of those but once in 3,000 seeds; 1 allows
    # for counts of nearly nothing.
    assert (abs(drawn - expected) <= 1 + 5 * np.sqrt(expected * (1 - law))).all()


def test_what_stood_before_the_last_token_says_nothing():
    def copied(rows: np.ndarray) -> float:
        triggered = rows[:, 1:-1] >= len(CHARACTERS)
        return float((rows[:, 2:] == rows[:, :-2])[triggered].mean())

    assert copied(rows_of("bigram_backcopy", 500)) == 1.0, "behind a trigger stands what stood before it"
    drawn = rows_of(f"bigrams:of=bigram_backcopy,tokens={LENGTH * 500}", 500)
    law = pairs_of(rows_of("bigram_backcopy", 500, seed=LAW_SEED))
    law /= law.sum(axis=1, keepdims=True)
    before, trigger = drawn[:, :-2][drawn[:, 1:-1] >= 24], drawn[:, 1:-1][drawn[:, 1:-1] >= 24]
    by_chance = law[trigger, before].mean()
    assert by_chance < 0.2
    # A mean of some 4,000 draws of 0 or 1, within 5 standard deviations.
    assert abs(copied(drawn) - by_chance) < 5 * np.sqrt(by_chance / len(before))


def test_every_pair_is_one_of_the_text(tmp_path, tokenizer):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the {word} reads the {other}" * 8 for word, other in pairwise(["cat", "dog", "cow", "fox"])))
    encoder = Encoder(vocab_size=len(tokenizer), tokenizer=tokenizer)
    known = {pair for row in rows_of(str(text), 9, encoder=encoder) for pair in pairwise(row.tolist())}
    drawn = {pair for row in rows_of(f"bigrams:of={text}", 40, encoder=encoder) for pair in pairwise(row.tolist())}
    assert drawn <= known
    assert len(drawn) > 10


def test_a_repeated_token_repeats():
    encoder = Encoder(vocab_size=9)
    for row in rows_of("bigrams:of=repeated_token,tokens=999", 20, encoder=encoder):
        assert len(set(row.tolist())) == 1


def test_the_seed_decides_and_fewer_samples_are_the_first_ones():
    def draw(seed, samples=4):
        corpus = resolve_corpus("bigrams:of=random_tokens,tokens=999")
        return corpus.sample(Encoder(vocab_size=50), seq_len=9, samples=samples, seed=seed, bos=False)

    assert hash_tokens(draw(0)) == hash_tokens(draw(0)) != hash_tokens(draw(1))
    assert hash_tokens(draw(0, samples=200)[:4]) == hash_tokens(draw(0))


def test_it_says_whose_pairs_it_has(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("one\n\ntwo\n")
    corpus = resolve_corpus(f"bigrams:of={text}")
    assert corpus.label == "bigrams of notes.txt"
    assert corpus.identity.source == "tokens drawn by the bigram law of: notes.txt"
    assert corpus.identity.revision == resolve_corpus(str(text)).identity.revision + ", 500000 tokens"


def test_a_text_that_is_too_short(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("abc\n\nabd\n")
    with pytest.raises(InputError, match=r"'notes.txt' .* gives no row of 64 tokens .* lower `seq_len`"):
        rows_of(f"bigrams:of={text}", 1)


def test_bigrams_of_bigrams():
    with pytest.raises(ConfigurationError, match=r"corpus 'bigrams' of bigrams: .* name the text itself"):
        resolve_corpus("bigrams:of=bigrams")
