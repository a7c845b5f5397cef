"""The source of bigram-backcopy sequences: a Markov chain of characters in which triggers copy the token before them.

Guo et al. 2024 (arXiv 2410.13835), as released. BOS comes first; the first character is drawn from the marginal law without
triggers; then the next character follows the law ``P(x, ·)`` of its predecessor ``x``, except behind a trigger, where it *is*
the token before the trigger. Two triggers never meet: the first character is none, and what follows a trigger stood before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable

import numpy as np

from sinklab.errors import ConfigurationError, InputError

__all__ = ["BigramChain", "estimate_chain", "only_letters"]

ROUNDING = 1e-9
"""By how much probabilities in float64 may miss 1."""


@dataclasses.dataclass(frozen=True, eq=False)
class BigramChain:
    """Characters, how one follows another, and which are triggers. Token ``i`` is ``characters[i]``; BOS is the token behind.

    Attributes:
        characters: most frequent first.
        following: ``P``, float64 ``(size, size)``: row ``a`` is the law of what follows ``a``. Rows of triggers are not used.
        marginal: float64 ``(size,)``: law of a single character.
        num_triggers: so many of the first characters are triggers; at least 1.

    Raises:
        ConfigurationError: no trigger, or no two characters that are none.
        InputError: laws that are none, or a character that only triggers follow, behind which a sequence would never go on.
    """

    characters: str
    following: np.ndarray
    marginal: np.ndarray
    num_triggers: int

    def __post_init__(self) -> None:
        size = len(self.characters)
        if not 1 <= self.num_triggers <= size - 2:
            raise ConfigurationError(
                f"bigram chain: {self.num_triggers} triggers among {size} characters; expected at least one, and two "
                "characters besides"
            )
        if self.following.shape != (size, size) or self.marginal.shape != (size,):
            raise InputError(
                f"bigram chain: {size} characters with laws of shapes {self.following.shape} and {self.marginal.shape}; "
                f"expected {(size, size)} and {(size,)}"
            )
        rows = np.vstack((self.following[self.num_triggers :], self.marginal))
        if not (rows >= 0).all() or not np.allclose(rows.sum(axis=1), 1, rtol=0, atol=ROUNDING):
            raise InputError("bigram chain: every law must be probabilities that sum to 1")
        stuck = np.flatnonzero(self.following[self.num_triggers :, self.num_triggers :].sum(axis=1) <= ROUNDING)
        if len(stuck):
            raise InputError(
                f"bigram chain: nothing but triggers follows {self.characters[self.num_triggers + stuck[0]]!r}, so that a "
                "sequence would stay there; take fewer `triggers`, or a longer text"
            )
        if self.marginal[self.num_triggers :].sum() <= ROUNDING:
            raise InputError("bigram chain: no sequence can begin: only triggers have a share in the marginal law")

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    @property
    def bos(self) -> int:
        """Token id of BOS."""
        return self.size

    @property
    def vocab_size(self) -> int:
        """Token ids: characters and BOS."""
        return self.size + 1

    @property
    def first(self) -> np.ndarray:
        """Law of the first character: the marginal one without the triggers, float64 ``(size,)``."""
        law = self.marginal.copy()
        law[: self.num_triggers] = 0
        return law / law.sum()

    @property
    def trigger_probability(self) -> np.ndarray:
        """``q``: probability of a trigger behind each character, float64 ``(size,)``; 0 for triggers themselves."""
        probability = self.following[:, : self.num_triggers].sum(axis=1)
        probability[: self.num_triggers] = 0
        return probability

    @property
    def identity(self) -> str:
        """SHA-256 of the characters, the laws and the number of triggers, in hexadecimal."""
        content = hashlib.sha256(f"{self.num_triggers} {self.characters}".encode())
        for law in (self.following, self.marginal):
            content.update(np.ascontiguousarray(law, dtype="<f8").tobytes())
        return content.hexdigest()

    def laws(self) -> np.ndarray:
        """Law of the next token by token, float64 ``(vocab_size, size)``; BOS is the last row, and rows of triggers are 0."""
        laws = np.vstack((self.following, self.first))
        laws[: self.num_triggers] = 0
        return laws

    def shares(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Exact probability of each character, and of a trigger behind it, at each place of a sequence.

        Args:
            length: tokens of a sequence, BOS included, at least 2.

        Returns:
            ``character`` and ``behind``, float64 ``(length - 1, size)`` each, for places 1 … length - 1; together they sum to 1
            at each place. ``character`` is 0 for triggers.
        """
        if length < 2:
            raise ConfigurationError(f"bigram chain: length {length} must be at least 2: BOS and a character")
        step, trigger = self.following.copy(), self.trigger_probability
        step[: self.num_triggers] = step[:, : self.num_triggers] = 0
        character, behind = np.zeros((length - 1, self.size)), np.zeros((length - 1, self.size))
        character[0] = self.first
        for position in range(1, length - 1):
            character[position] = character[position - 1] @ step + behind[position - 1]
            behind[position] = character[position - 1] * trigger
        return character, behind

    def entropies(self) -> np.ndarray:
        """Entropy of the next token by token, in nats, float64 ``(vocab_size,)``; 0 for triggers, whose successor is known."""
        laws = self.laws()
        return -(laws * np.log(np.where(laws > 0, laws, 1.0))).sum(axis=1)

    def entropy_floor(self, length: int) -> float:
        """Least expected loss a token, in nats, of any predictor that reads ``length`` tokens and predicts as many.

        The entropy of the sequence divided by its length, exact: no predictor is better on average, and the one that knows the
        chain and looks one token back at triggers attains it.
        """
        entropies = self.entropies()
        character, _ = self.shares(length) if length > 1 else (np.zeros((0, self.size)), None)
        return float((entropies[self.bos] + (character @ entropies[: self.size]).sum()) / length)


def only_letters(text: str) -> str:
    """A text as lower-case words with one blank between them: 27 characters, a to z and the blank.

    In text as it stands triggers follow some characters nearly always (a blank a comma, a blank a line break in code). Each of
    these then comes back behind the trigger, over and over, and fills a quarter of all sequences.
    """
    return re.sub("[^a-z]+", " ", text.lower())


def estimate_chain(texts: Iterable[str], characters: int, triggers: int, budget: int = 1_000_000) -> BigramChain:
    """The chain of the bigrams of a text: counts of pairs divided by their sums, nothing smoothed.

    Args:
        texts: pairs are not counted across texts.
        characters: how many of the most frequent ones to keep. Others are taken out of the text, whose neighbours then meet;
            ties go to the lower code point.
        triggers: how many of the most frequent are triggers; 3 in the paper.
        budget: characters of text to read.

    Raises:
        ConfigurationError: numbers out of their range.
        InputError: fewer characters than asked for, or a text from which no chain can be made.
    """
    if budget < 2:
        raise ConfigurationError(f"bigram chain: a budget of {budget} characters holds no pair; expected 2 or more")
    read: list[np.ndarray] = []
    for text in texts:
        codes = np.frombuffer(text[:budget].encode("utf-32-le", errors="replace"), dtype="<u4")
        read.append(codes)
        budget -= len(codes)
        if budget <= 0:
            break
    present, counts = np.unique(np.concatenate(read), return_counts=True) if read else (np.zeros(0), np.zeros(0))
    if len(present) < characters:
        raise InputError(
            f"bigram chain: the text has {len(present)} different characters, and the task needs {characters}; take a text "
            "with more of them"
        )
    chosen = present[np.lexsort((present, -counts))[:characters]]
    order = np.argsort(chosen)
    pairs = np.zeros((characters, characters))
    single = np.zeros(characters)
    for codes in read:
        codes = codes[np.isin(codes, chosen)]
        tokens = order[np.searchsorted(chosen[order], codes)]
        single += np.bincount(tokens, minlength=characters)
        pairs += np.bincount(tokens[:-1] * characters + tokens[1:], minlength=characters**2).reshape(characters, characters)
    totals = pairs.sum(axis=1)
    if (totals == 0).any():
        raise InputError(
            f"bigram chain: nothing follows {chr(int(chosen[int(np.argmin(totals))]))!r} in the text; take a longer text"
        )
    letters = "".join(chr(int(code)) for code in chosen)
    return BigramChain(letters, pairs / totals[:, None], single / single.sum(), triggers)
