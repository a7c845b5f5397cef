"""What read-outs get: a model in evaluation mode and rows of text for it; and such a model from a run folder."""

from __future__ import annotations

import abc
import functools
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.models.loading import LoadedModel, load_model
from sinklab.results.table import read_run, read_table
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import PreparedData, prepare_data
from sinklab.training.record import weights_sha256
from sinklab.training.rows import TextRows

__all__ = ["MeasuredModel", "TrainedModel"]


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
    @abc.abstractmethod
    def every_row_has_bos(self) -> bool:
        """Whether :attr:`bos` stands in front of every row, and not only where a document begins."""

    @property
    @abc.abstractmethod
    def fixed(self) -> tuple[int, int] | None:
        """Position and id of a token that stands there in every row; ``None`` where there is none."""

    @abc.abstractmethod
    def rows(self, samples: int = 100, seq_len: int | None = None) -> Tensor:
        """Text, int64 ``(samples, seq_len)`` on the model's device, as a model of its training reads it.

        Args:
            samples: at most; a small text may have fewer.
            seq_len: at most :attr:`context`, which is the default.
        """

    def text(self, samples: int = 100, seq_len: int | None = None) -> TextRows:
        """The same rows with the documents that the training kept apart in them, as the model has learned to read them."""
        return TextRows(self.rows(samples, seq_len))

    @property
    @abc.abstractmethod
    def draw(self) -> int:
        """Seed of what a read-out draws by itself."""

    @property
    @abc.abstractmethod
    def text_ids(self) -> Tensor:
        """Ids that occur in the text, without special ones; int64, ascending."""


class TrainedModel(MeasuredModel):
    """One model that pre-training has left in a run folder.

    Everything is read when it is first asked for.

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
        """The model with its tokenizer, float32 on a CPU and in its own dtype elsewhere, in evaluation mode.

        Read-outs share it, so one that changes weights must work on a copy (``copy.deepcopy(trained.loaded.model)``).
        """
        return load_model(str(self.folder / "model"))

    @functools.cached_property
    def data(self) -> PreparedData:
        """The text: ``data.held_out`` has the held-out rows, ``data.probe_text`` their beginnings."""
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
        """Held-out text as in training; there are at most ``config.data.held_out_rows`` rows.

        Raises:
            ConfigurationError: the training kept documents of a row apart, and ids alone do not say where they begin.
        """
        text = self.text(samples, seq_len)
        if text.documents > len(text):
            raise ConfigurationError(
                f"{self.folder.name}: {len(text)} held-out rows hold {text.documents} documents, which the training kept apart "
                "(data.packing=isolated) and ids alone would merge; read text() with its position_ids, or train with "
                "data.packing=stream"
            )
        return text.ids

    def text(self, samples: int = 100, seq_len: int | None = None) -> TextRows:
        length = self.context if seq_len is None else min(seq_len, self.context)
        wanted = min(samples, self.config.data.held_out_rows)
        return self.data.probe_text(wanted, length, front=self.front).to(self.loaded.device)

    @property
    def draw(self) -> int:
        """The same for all trainings, so that models of one vocabulary are read on the same draws."""
        return 0

    @property
    def text_ids(self) -> Tensor:
        ids = self.data.held_out.unique()
        return ids[~torch.isin(ids, torch.tensor(self.data.tokenizer.all_special_ids, dtype=torch.int64))]
