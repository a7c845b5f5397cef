"""One token, repeated: only the position scheme distinguishes positions; what happens to the sink?"""

from __future__ import annotations

import random
from collections.abc import Iterator

from sinklab.corpora.base import Corpus, Encoder, Identity, drawable_ids
from sinklab.registry import corpora


@corpora.register("repeated_token")
class RepeatedToken(Corpus):
    """Each sample is one token, drawn uniformly from the vocabulary without special tokens, and repeated.

    Gu et al. 2024 (arXiv 2410.10781, propositions 1-4): without absolute positions every hidden state is the same, so the sink
    disperses (LLaMA2-7B: from 92 % to 0); with learned positions it stays (GPT2-XL: 62 %). A beginning-of-sequence token in
    front breaks the symmetry, so this corpus is read without one where the propositions are meant.
    """

    @property
    def identity(self) -> Identity:
        return Identity(
            source="one token a sample, drawn uniformly from the vocabulary without special tokens",
            revision="1",
            licence="none",
        )

    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        ids = drawable_ids(encoder)
        generator = random.Random(seed)
        while True:
            yield [generator.choice(ids)] * length
