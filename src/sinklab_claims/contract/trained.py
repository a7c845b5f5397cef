"""What read-outs get: a model in evaluation mode and rows of text for it; and such a model from a run folder."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import pandas as pd
import torch
from torch import Tensor

from sinklab.corpora.base import Corpus
from sinklab.errors import DoesNotApply
from sinklab.models.loading import LoadedModel, load_model
from sinklab.models.losses import is_causal_lm
from sinklab.models.positions import trained_length
from sinklab.results.metric import Metric
from sinklab.results.table import read_run, read_table
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import PreparedData, prepare_data
from sinklab.training.record import weights_sha256


class MeasuredModel(abc.ABC):
    """A model and text for it: all that a read-out needs that does not ask how the model was trained."""

    @property
    @abc.abstractmethod
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer, in evaluation mode; read-outs share it, so one that changes weights works on a copy."""

    @property
    @abc.abstractmethod
    def context(self) -> int:
        """Tokens of the longest rows, at most as many as the model was trained on at once."""

    @property
    @abc.abstractmethod
    def front(self) -> int:
        """Learned tokens that the model itself puts in front of every row."""

    @property
    @abc.abstractmethod
    def bos(self) -> int | None:
        """Id of the token in front of texts; ``None`` where there is none."""

    @property
    def every_row_has_bos(self) -> bool:
        """Whether :attr:`bos` stands in front of every row, and not only where a document begins."""
        return self.bos is not None

    @property
    def fixed(self) -> tuple[int, int] | None:
        """Position and id of a token that stands there in every row; ``None`` where there is none."""
        return None

    @abc.abstractmethod
    def rows(self, samples: int = 100, seq_len: int | None = None) -> Tensor:
        """Text, int64 ``(samples, seq_len)`` on the model's device, as a model of its training reads it.

        Args:
            samples: at most; a small text may have fewer.
            seq_len: at most :attr:`context`, which is the default.
        """

    @property
    def large(self) -> bool:
        """Whether the model is of a size at which fewer texts are read."""
        return False

    draw = 0
    """Seed of what a read-out draws by itself; the same for all trainings, so that models are read on the same draws."""

    @property
    @abc.abstractmethod
    def text_ids(self) -> Tensor:
        """Ids that occur in the text, without special ones; int64, ascending."""


class TrainedModel(MeasuredModel):
    """One model that pre-training has left in a run folder; everything is read when it is first asked for.

    Args:
        folder: output directory of a finished run of :func:`~sinklab.training.train.run_training`.
        cache: directory of encoded text.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache

    @functools.cached_property
    def config(self) -> PretrainingConfig:
        """What was asked for."""
        return PretrainingConfig.parse(read_run(self.folder)["config"])

    @functools.cached_property
    def weights(self) -> str | None:
        """Which weights these are: SHA-256 of their files; ``None`` where a run that diverged has left none."""
        found = read_run(self.folder).get("weights_sha256")
        return weights_sha256(self.folder / "model") if found is None else str(found)

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """The long table of the training: losses and sinks by ``step``."""
        return read_table(self.folder / "table.parquet")

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer, float32 on a CPU and in its own dtype elsewhere, in evaluation mode."""
        return load_model(str(self.folder / "model"))

    @functools.cached_property
    def data(self) -> PreparedData:
        """The text: ``data.held_out`` has the held-out rows, ``data.probe_rows`` their beginnings."""
        return prepare_data(self.config, self.cache)

    @property
    def context(self) -> int:
        """Tokens of the context of the training."""
        return self.config.model.max_position_embeddings

    @property
    def front(self) -> int:
        return self.config.model.tokens_in_front

    @property
    def bos(self) -> int | None:
        return None if self.config.data.bos == "none" else self.data.tokenizer.bos_token_id

    @property
    def every_row_has_bos(self) -> bool:
        return self.config.data.bos == "rows"

    @property
    def fixed(self) -> tuple[int, int] | None:
        data = self.config.data
        return None if data.fixed_position is None else (data.fixed_position, data.fixed_token)

    def rows(self, samples: int = 100, seq_len: int | None = None) -> Tensor:
        """Held-out text as in training; there are at most ``config.data.held_out_rows`` rows."""
        length = self.context if seq_len is None else min(seq_len, self.context)
        return self.data.probe_rows(min(samples, self.config.data.held_out_rows), length).to(self.loaded.device)

    @property
    def text_ids(self) -> Tensor:
        ids = self.data.held_out.unique()
        return ids[~torch.isin(ids, torch.tensor(self.data.tokenizer.all_special_ids, dtype=torch.int64))]


Kind = Literal["decoder", "encoder", "encoder-decoder", "image model"]
"""What a model reads and predicts: ``decoder``, the next token; ``encoder``, a text that it sees whole."""

Reads = Literal["samples", "context", "long", "past the training"]
"""What a claim reads: rows of 64 tokens, of the context of the training, texts longer than a cache, or than the training."""

LONGEST_STREAM = 16_384
"""Tokens of the longest text that is read to its end."""

LONG, STREAMS, STREAMED = 4, 16, 1024
"""Times a cache or the trained context that long texts have, such texts of a draw, and tokens of one, unless others are asked
for or the trained context is less than a quarter of that."""

LARGE, FEWER, FEW_STREAMS = 50_000_000, 3_200, 3
"""Parameters above which a model reads so few tokens for a number, and so few long texts: its effects are large, and each
token costs."""


class Checkpoint(MeasuredModel):
    """Any model, and rows that each begin at another place of a corpus, in the special tokens that its tokenizer puts round it.

    Args:
        corpus: text that the tokenizer can read.
        seed: of the draw of the rows.
        streamed: tokens of a long text.
    """

    def __init__(self, loaded: LoadedModel, corpus: Corpus, seed: int = 0, streamed: int = STREAMED) -> None:
        self._loaded, self.corpus, self.draw, self.streamed = loaded, corpus, seed, streamed

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
        """Tokens of the longest rows: those of the training, and at most those of a long text."""
        return min(self.streamed, self.trained_on)

    @property
    def large(self) -> bool:
        return self.loaded.num_parameters > LARGE

    @functools.cached_property
    def front(self) -> int:
        return int(getattr(self.loaded.model.config, "tokens_in_front", 0))

    @functools.cached_property
    def bos(self) -> int | None:
        return self.loaded.encoder.bos_token_id if self.loaded.encoder.adds_bos else None

    def rows(self, samples: int = 100, seq_len: int | None = None) -> Tensor:
        """Rows of the corpus, drawn by the seed; of a large model no more than 3,200 tokens, or three rows."""
        length = self.context if seq_len is None else min(seq_len, trained_length(self.loaded.model) or seq_len)
        samples = min(samples, max(FEW_STREAMS, FEWER // length)) if self.large else samples
        return self._sample(samples, length).to(self.loaded.device)

    def streams(self, number: int = STREAMS, *, past_training: bool = False) -> Tensor:
        """Long texts: int64 ``(number, streamed)`` on the CPU, at most four times the trained context.

        Args:
            past_training: as many as that, however many are asked for: what is said is about texts longer than the training.

        Raises:
            DoesNotApply: a context so long that nobody waits for four of it.
        """
        length = LONG * self.trained_on
        if not past_training:
            return self._sample(number, min(length, self.streamed))
        if length > LONGEST_STREAM:
            raise DoesNotApply(
                f"it was trained on {self.trained_on:,} tokens, and texts {LONG} times as long, {length:,} tokens, are more "
                f"than the {LONGEST_STREAM:,} that are read to their end"
            )
        return self._sample(number, length)

    def _sample(self, samples: int, length: int) -> Tensor:
        return self.corpus.sample(
            self.loaded.encoder, seq_len=length, samples=samples, seed=self.draw, bos=self.bos is not None
        )

    @functools.cached_property
    def text_ids(self) -> Tensor:
        ids = self._sample(100, min(64, trained_length(self.loaded.model) or 64)).unique()
        return ids[~torch.isin(ids, torch.tensor(sorted(self.loaded.encoder.special_ids), dtype=torch.int64))]


def rows_read(checkpoint: Checkpoint, reads: Reads) -> Tensor:
    """The rows that a claim reads most of, int64 ``(rows, length)``; they are drawn, so that a text too short shows.

    Raises InputError for such a text, and DoesNotApply for rows that the model cannot have.
    """
    if reads == "context":
        checkpoint.rows(32)
    if reads in ("long", "past the training"):
        return checkpoint.streams(past_training=reads != "long")
    return checkpoint.rows(100, 64)


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


F = TypeVar("F", bound=Callable[..., Any])


def once(function: F) -> F:
    """Keep what a function gives for a checkpoint, which nothing changes: claims share it."""
    kept: weakref.WeakKeyDictionary[Checkpoint, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def given(model: MeasuredModel) -> Any:
        if not isinstance(model, Checkpoint):
            return function(model)
        if model not in kept:
            kept[model] = function(model)
        return kept[model]

    return cast(F, given)


def gives(*metrics: Metric, of_diverged: bool = False) -> Callable[[F], F]:
    """Mark a function of a trained model with the metrics of its numbers.

    Args:
        of_diverged: it reads the table of a training, and so those too that have left no model.
    """

    def mark(read_out: F) -> F:
        marked: Any = read_out
        marked.metrics, marked.of_diverged = metrics, of_diverged
        return read_out

    return mark
