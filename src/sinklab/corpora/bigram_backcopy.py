"""Bigram-backcopy: an endless synthetic language in which one head must copy after triggers and stay silent elsewhere.

The grammar is that of Guo et al. 2024 (arXiv 2410.13835): a character follows the law of the one before it, except behind a
trigger, where it *is* the character before the trigger. A softmax head that copies can keep still elsewhere only by a sink,
which therefore appears within seconds of training. The laws are drawn once from a fixed seed instead of counted from a text,
so the language is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from sinklab.corpora.base import Identity, Split, TextCorpus
from sinklab.registry import corpora

__all__ = ["BigramBackcopy"]

CHARACTERS = "abcdefghijklmnopqrstuvwx"
TRIGGERS = "!?#"
LENGTH = 256
"""Characters of a document."""
BLOCK = 500
"""Documents that are drawn together; their number says nothing about the text."""


@corpora.register("bigram_backcopy")
class BigramBackcopy(TextCorpus):
    """24 letters with random bigram laws and three triggers, which stand behind a letter with probability 0.05 to 0.35.

    One document has 256 characters. Training text is endless: give ``data.max_tokens``. With the smallest vocabulary
    (``data.vocab_size=258``, bytes and nothing merged) one character is one token.
    """

    endless: ClassVar[bool] = True

    @property
    def identity(self) -> Identity:
        return Identity(
            source="bigram-backcopy sequences (Guo et al. 2024) over laws drawn from a fixed seed", revision="1", licence="none"
        )

    def passages(self, seed: int) -> Iterator[str]:
        return _drawn(np.random.default_rng([2, seed]))

    def documents(self, split: Split) -> Iterator[str]:
        """Training documents without end, and as many held out as are asked for; drawn from two seeds."""
        return _drawn(np.random.default_rng([0 if split == "train" else 1]))


def laws() -> tuple[np.ndarray, np.ndarray]:
    """Law of the letter behind each letter, ``(24, 24)``, and probability of a trigger behind it, ``(24,)``; float64."""
    generator = np.random.default_rng(2410_13835)
    return generator.dirichlet(np.full(len(CHARACTERS), 0.2), size=len(CHARACTERS)), generator.uniform(
        0.05, 0.35, len(CHARACTERS)
    )


def _drawn(generator: np.random.Generator) -> Iterator[str]:
    """Documents; token ids are letters first, then triggers."""
    following, trigger = laws()
    thresholds = following.cumsum(axis=1)[:, :-1]
    letters, triggers = len(CHARACTERS), len(TRIGGERS)
    alphabet = np.array(list(CHARACTERS + TRIGGERS))
    while True:
        tokens = np.empty((LENGTH, BLOCK), dtype=np.int64)
        tokens[0] = before = generator.integers(letters, size=BLOCK)
        for at in range(1, LENGTH):
            copies = tokens[at - 1] >= letters
            drawn = (thresholds[before] <= generator.random(BLOCK)[:, None]).sum(axis=1)
            triggered = (generator.random(BLOCK) < trigger[before]) & ~copies
            tokens[at] = np.where(
                copies, before, np.where(triggered, letters + generator.integers(triggers, size=BLOCK), drawn)
            )
            before = np.where(tokens[at] < letters, tokens[at], before)
        yield from ("".join(row) for row in alphabet[tokens.T])
