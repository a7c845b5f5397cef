"""What a corpus is: rows of token ids of one length, made from a seed, with an identity that says where they come from."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError, InputError

__all__ = ["Corpus", "Encoder", "Identity", "TextCorpus", "hash_tokens"]


@dataclasses.dataclass(frozen=True)
class Identity:
    """Where the tokens come from: what is needed to get the same ones again."""

    source: str
    revision: str
    licence: str


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What a corpus needs to know of a model's vocabulary.

    Args:
        vocab_size: ids are drawn below it.
        bos_token_id: beginning-of-sequence id, ``None`` when the model has none.
        tokenizer: a transformers tokenizer; ``None`` for a model that came without one.
        special_ids: ids that random tokens leave out.
    """

    vocab_size: int
    bos_token_id: int | None = None
    tokenizer: Any = None
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without special tokens.

        Raises:
            InputError: the model came without a tokenizer.
        """
        if self.tokenizer is None:
            raise InputError(
                "this model directory has no tokenizer, so it cannot read text; use --corpus random_tokens or repeated_token"
            )
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Corpus(abc.ABC):
    """Rows of token ids. Deterministic: the same seed, encoder and lengths give the same rows."""

    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def identity(self) -> Identity:
        """Source, revision and licence, for the run record."""

    @abc.abstractmethod
    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        """Endless or finite rows of exactly ``length`` ids, none of them a special token."""

    def sample(self, encoder: Encoder, *, seq_len: int, samples: int, seed: int, bos: bool) -> Tensor:
        """The first ``samples`` rows, int64 ``(samples, seq_len)``.

        Args:
            bos: put the beginning-of-sequence token at position 0; the row then holds ``seq_len - 1`` corpus tokens.

        Raises:
            ConfigurationError: ``bos`` asked of a model without such a token, or lengths below 2.
            InputError: the corpus holds fewer rows than asked for.
        """
        if seq_len < 2 or samples < 1:
            raise ConfigurationError(f"--seq-len must be at least 2 and --samples at least 1, got {seq_len} and {samples}")
        if bos and encoder.bos_token_id is None:
            raise ConfigurationError("this model has no beginning-of-sequence token; use --bos none")
        rows: list[list[int]] = []
        for row in self.rows(encoder, seq_len - bos, seed):
            rows.append([encoder.bos_token_id, *row] if bos else row)  # type: ignore[list-item]
            if len(rows) == samples:
                return torch.tensor(rows, dtype=torch.int64)
        raise InputError(
            f"corpus {self.name!r} ({self.identity.source}) is too short: it gives {len(rows)} of {samples} samples of "
            f"{seq_len} tokens; lower --samples or --seq-len, or give a longer text"
        )


class TextCorpus(Corpus):
    """A corpus made of passages of text, each encoded and cut to length; passages that are too short are passed over."""

    @abc.abstractmethod
    def passages(self, seed: int) -> Iterator[str]:
        """Passages in an order that depends on the seed alone."""

    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        for text in self.passages(seed):
            # Eight characters a token is far above any tokenizer on text; encoding a whole file for its first tokens is not needed.
            ids = encoder.encode(text[: 8 * length + 64])
            if len(ids) < length:
                ids = encoder.encode(text)
            if len(ids) >= length:
                yield ids[:length]


def hash_tokens(tokens: Tensor) -> str:
    """SHA-256 of the ids as little-endian int64, in hexadecimal: the same tokens, the same hash on any machine."""
    return hashlib.sha256(tokens.to(torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()
