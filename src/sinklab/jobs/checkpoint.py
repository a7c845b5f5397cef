"""A checkpoint as read-outs get it: any model with rows of a text that a seed draws; and why some claims are not about it."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from sinklab.corpora.base import Corpus
from sinklab.errors import DoesNotApply
from sinklab.jobs.trained import MeasuredModel
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import is_causal_lm
from sinklab.models.positions import trained_length

__all__ = ["LONG", "Checkpoint", "Kind", "Reads", "check_texts", "kind_of", "not_about", "rows_read"]

Kind = Literal["decoder", "encoder", "encoder-decoder", "image model"]
"""What a model reads and predicts: ``decoder``, the next token; ``encoder``, a text that it sees whole."""

Reads = Literal["samples", "context", "long"]
"""What a claim reads: rows of 64 tokens, of the context of the training, or of four times that."""

LONGEST = 2048
"""Tokens of the longest rows that read-outs get; what they say of a window needs no more."""

LONG = 4
"""Times the trained context that long texts have."""

LONGEST_STREAM = 16_384
"""Tokens of the longest text that is read to its end: four times the context of models of 4,096 tokens."""

STREAMS = 16
"""Long texts of a draw."""


class Checkpoint(MeasuredModel):
    """Any model, and rows that each begin at another place of a corpus, in the special tokens that its tokenizer puts round it.

    Args:
        corpus: text that the tokenizer can read.
        seed: of the draw of the rows.
    """

    def __init__(self, loaded: LoadedModel, corpus: Corpus, seed: int = 0) -> None:
        self._loaded, self.corpus, self.seed = loaded, corpus, seed

    @property
    def loaded(self) -> LoadedModel:
        return self._loaded

    @functools.cached_property
    def trained_on(self) -> int:
        """Tokens of the context of its training, as its configuration says.

        Raises:
            DoesNotApply: it does not say.
        """
        length = trained_length(self.loaded.model)
        if length is None:
            raise DoesNotApply("its configuration does not say how long a context it was trained on, and windows rest on that")
        return length

    @property
    def context(self) -> int:
        """Tokens of the longest rows: those of the training, and at most 2,048."""
        return min(LONGEST, self.trained_on)

    @functools.cached_property
    def front(self) -> int:
        return int(getattr(self.loaded.model.config, "tokens_in_front", 0))

    @functools.cached_property
    def bos(self) -> int | None:
        return self.loaded.encoder.bos_token_id if self.loaded.encoder.adds_bos else None

    @property
    def every_row_has_bos(self) -> bool:
        return self.bos is not None

    @property
    def fixed(self) -> None:
        return None

    @property
    def draw(self) -> int:
        return self.seed

    def rows(self, samples: int = 100, seq_len: int | None = None) -> Tensor:
        """Rows of the corpus, drawn by the seed."""
        length = self.context if seq_len is None else min(seq_len, trained_length(self.loaded.model) or seq_len)
        return self._sample(samples, length).to(self.loaded.device)

    def streams(self, number: int = STREAMS) -> Tensor:
        """Long texts, four times the trained context each: int64 ``(number, 4 · trained_on)`` on the CPU.

        Raises:
            DoesNotApply: a context so long that nobody waits for four of it.
        """
        length = LONG * self.trained_on
        if length > LONGEST_STREAM:
            raise DoesNotApply(
                f"it was trained on {self.trained_on:,} tokens, and texts {LONG} times as long, {length:,} tokens, are more "
                f"than the {LONGEST_STREAM:,} that are read to their end"
            )
        return self._sample(number, length)

    def _sample(self, samples: int, length: int) -> Tensor:
        return self.corpus.sample(
            self.loaded.encoder, seq_len=length, samples=samples, seed=self.seed, bos=self.bos is not None
        )

    @functools.cached_property
    def text_ids(self) -> Tensor:
        ids = self._sample(100, min(64, trained_length(self.loaded.model) or 64)).unique()
        return ids[~torch.isin(ids, torch.tensor(sorted(self.loaded.encoder.special_ids), dtype=torch.int64))]


def check_texts(checkpoint: Checkpoint, reads: Reads) -> None:
    """Draw the rows that a claim reads, so that a text that is too short is known before anything is measured.

    Raises:
        InputError: it is, or the model came without a tokenizer.
        DoesNotApply: rows that the model cannot have.
    """
    rows_read(checkpoint, reads)
    if reads == "context":
        checkpoint.rows(32)


def rows_read(checkpoint: Checkpoint, reads: Reads) -> Tensor:
    """The rows that a claim reads most of, int64 ``(rows, length)``.

    Raises:
        InputError, DoesNotApply: as :func:`check_texts`.
    """
    return checkpoint.streams() if reads == "long" else checkpoint.rows(100, 64)


def kind_of(loaded: LoadedModel) -> Kind:
    """What a model reads and predicts."""
    if loaded.encoder.vocab_size == 0 and loaded.encoder.rows == 0:
        return "image model"
    if loaded.model.config.is_encoder_decoder:
        return "encoder-decoder"
    return "decoder" if is_causal_lm(loaded.model) else "encoder"


_NOT_ABOUT = {
    "encoder": "it fills gaps in a text that it sees whole, and the claim is about models that predict the next token",
    "encoder-decoder": "it has an encoder and a decoder, and the claim is about models that read one text",
    "image model": "it reads images, and the claim is about tokens of a text",
}


def not_about(kind: Kind, about: str) -> str:
    """Why a claim about ``decoder`` or ``text`` models is not about a model of a kind; empty where it is."""
    if kind == "image model" and about == "text":
        return "it reads images, and what is said here of the first token is measured on texts alone"
    return "" if kind == "decoder" or (kind == "encoder" and about == "text") else _NOT_ABOUT[kind]
