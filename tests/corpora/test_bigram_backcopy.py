from itertools import islice

import numpy as np

from sinklab.corpora import resolve_corpus
from sinklab.corpora.bigram_backcopy import CHARACTERS, LENGTH, TRIGGERS, laws

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
