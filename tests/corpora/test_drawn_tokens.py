"""Drawn tokens: at random, by a law of pairs, and the made-up language behind the trigger task's."""

from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder, hash_tokens
from sinklab.corpora.bigram_backcopy import CHARACTERS, LENGTH, TRIGGERS, laws
from sinklab.corpora.bigrams import LAW_SEED
from sinklab.errors import ConfigurationError, InputError

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


WIDTH = 64


class Characters:
    """A tokenizer of the made-up language: a letter or a trigger is a token."""

    def __call__(self, text: str, **keywords: object) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **keywords: object) -> list[int]:
        return [(CHARACTERS + TRIGGERS).index(character) for character in text]


BACKCOPY = Encoder(vocab_size=27, tokenizer=Characters())


def rows_of(corpus: str, number: int, seed: int = 0, encoder: Encoder = BACKCOPY) -> np.ndarray:
    return np.array(list(islice(resolve_corpus(corpus).rows(encoder, WIDTH, seed), number)))


def pairs_of(rows: np.ndarray) -> np.ndarray:
    counts = np.zeros((27, 27))
    np.add.at(counts, (rows[:, :-1], rows[:, 1:]), 1)
    return counts


def test_pairs_are_as_frequent_as_in_the_text():
    drawn = pairs_of(rows_of(f"bigrams:of=bigram_backcopy,tokens={WIDTH * 500}", 500))
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
    drawn = rows_of(f"bigrams:of=bigram_backcopy,tokens={WIDTH * 500}", 500)
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


@pytest.mark.parametrize("corpus", ["random_tokens", "bigrams:of=random_tokens,tokens=999"])
def test_the_seed_decides_and_fewer_samples_are_the_first_ones(corpus):
    def draw(seed, samples=4):
        return resolve_corpus(corpus).sample(ENCODER, seq_len=9, samples=samples, seed=seed, bos=False)

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


CORPUS = resolve_corpus("bigram_backcopy")


def drawn(split: str, documents: int) -> list[str]:
    return list(islice(CORPUS.documents(split), documents))


def test_the_same_documents_come_every_time_and_the_splits_differ():
    train, held_out = drawn("train", 600), drawn("held_out", 600)
    assert train == drawn("train", 600)
    assert {len(text) for text in train} == {LENGTH}
    assert not set(train) & set(held_out)
    assert len(set(train)) == 600


def test_passages_follow_the_seed_and_are_of_neither_split():
    def passages(seed):
        return list(islice(CORPUS.passages(seed), 20))

    assert passages(0) == passages(0) != passages(1)
    assert not set(passages(0)) & set(drawn("train", 500))


def test_behind_a_trigger_stands_what_stood_before_it():
    for text in drawn("train", 50):
        assert text[0] in CHARACTERS
        triggers = [at for at, character in enumerate(text) if character in TRIGGERS]
        assert triggers
        for at in triggers:
            assert text[at - 1] in CHARACTERS, "two triggers meet"
            if at + 1 < LENGTH:
                assert text[at + 1] == text[at - 1]


def test_letters_and_triggers_follow_the_laws_that_were_drawn():
    following, trigger = laws()
    np.testing.assert_allclose(following.sum(axis=1), 1.0, rtol=0, atol=1e-12)
    letters = len(CHARACTERS)
    counts = np.zeros((letters, letters + 1))
    for text in drawn("train", 500):
        for at in range(1, LENGTH):
            # Behind a trigger nothing is drawn.
            if text[at - 1] in CHARACTERS:
                column = CHARACTERS.index(text[at]) if text[at] in CHARACTERS else letters
                counts[CHARACTERS.index(text[at - 1]), column] += 1
    expected = np.hstack([following * (1 - trigger)[:, None], trigger[:, None]])
    rows = counts.sum(axis=1, keepdims=True)
    # Draws behind one letter are independent, so a count is binomial: standard deviation sqrt(n p (1 - p)). 600 counts lie
    # within 5 of those but once in 3,000 seeds, and the seed is fixed; the 1 allows for counts of nearly nothing.
    assert (abs(counts - rows * expected) <= 1 + 5 * np.sqrt(rows * expected * (1 - expected))).all()
    # Every trigger as often as the others: 500 documents have some 20,000 of them.
    text = "".join(drawn("train", 500))
    number = [text.count(trigger) for trigger in TRIGGERS]
    total = sum(number)
    assert max(abs(one - total / 3) for one in number) <= 5 * np.sqrt(total * (1 / 3) * (2 / 3))
