"""Bigrams: each token drawn given only the one before it, with a text's frequencies, so that attention has nothing to add."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Corpus, Encoder, Identity
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import corpora

__all__ = ["Bigrams"]

LAW_SEED = 0
"""Seed of the rows whose pairs are counted, so that samples of every seed follow the same law."""
BLOCK = 64
"""Rows that are drawn together."""


@corpora.register("bigrams")
class Bigrams(Corpus):
    """Tokens of another corpus whose order is kept from one token to the next, and no further.

    The next token depends on the current one alone, which a model has without looking back. What a head reports of earlier
    tokens is then of no use at best; a head that is of use on the text itself is seen to rest here, or to disturb (the bigram
    part of Guo et al. 2024, arXiv 2410.13835, whose heads are active in one domain and dormant in another). Beside that text,
    as in ``--corpus python_source,bigrams``, it is the second domain that `sinklab causes` asks of a switch.

    Every row begins with a token of the text; where a token has no successor in the text, another is drawn.

    Args:
        of: the corpus whose pairs are counted, in rows as long as those asked for; a file is written ``bigrams:of=notes.txt``.
        tokens: of that corpus, as far as it has so many; at least 2.

    Raises:
        UnknownNameError, InputError: as of that corpus.
        ConfigurationError: bigrams of bigrams, or fewer tokens than two.
    """

    def __init__(self, of: str = "python_source", tokens: int = 500_000) -> None:
        if tokens < 2:
            raise ConfigurationError(f"corpus 'bigrams': tokens {tokens} hold no pair; take at least 2")
        self.of, self.tokens = of, tokens
        self._source = resolve_corpus(of)
        if isinstance(self._source, Bigrams):
            raise ConfigurationError(
                "corpus 'bigrams' of bigrams: bigrams of bigrams follow the same law; name the text itself"
            )
        self._known: tuple[Encoder, np.ndarray] | None = None

    @property
    def label(self) -> str:
        return f"bigrams of {self._source.label}"

    @property
    def identity(self) -> Identity:
        text = self._source.identity
        return Identity(
            source=f"tokens drawn by the bigram law of: {text.source}",
            revision=f"{text.revision}, {self.tokens} tokens",
            licence=text.licence,
        )

    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        """Endless rows; a text that gives no row of two tokens or more is refused."""
        text = self._text(encoder, length)
        # A successor of a token is what stands behind one of its occurrences, drawn uniformly: that is the law of its pairs.
        before, behind = text[:, :-1].ravel(), text[:, 1:].ravel()
        order = np.argsort(before, kind="stable")
        counts = np.bincount(before, minlength=int(text.max()) + 1)
        firsts = counts.cumsum() - counts
        generator = np.random.default_rng([LAW_SEED, seed])
        while True:
            drawn = np.empty((length, BLOCK), dtype=np.int64)
            drawn[0] = generator.choice(before, size=BLOCK)
            for at in range(1, length):
                current = drawn[at - 1]
                known = counts[current] > 0
                chosen = firsts[current] + (generator.random(BLOCK) * counts[current]).astype(np.int64)
                anew = generator.choice(before, size=BLOCK)
                drawn[at] = np.where(known, behind[order[np.where(known, chosen, 0)]], anew)
            yield from drawn.T.tolist()

    def _text(self, encoder: Encoder, length: int) -> np.ndarray:
        """Rows of the text, int64 ``(rows, length)``."""
        if self._known is None or self._known[0] is not encoder or self._known[1].shape[1] != length:
            rows = list(itertools.islice(self._source.rows(encoder, max(length, 2), LAW_SEED), -(-self.tokens // length)))
            if not rows:
                raise InputError(
                    f"corpus {self._source.label!r} ({self._source.identity.source}) is too short: it gives no row of {length} "
                    "tokens whose pairs could be counted; lower `seq_len`, or give a longer text"
                )
            self._known = encoder, np.array(rows)
        return self._known[1]
