"""A trained model as read-outs get it: its run folder, its weights in evaluation mode, and rows of held-out text."""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd
from torch import Tensor

from sinklab.models.loading import LoadedModel, load_model
from sinklab.results.table import read_run, read_table
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import PreparedData, prepare_data
from sinklab.training.record import weights_sha256

__all__ = ["TrainedModel"]


class TrainedModel:
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
        """The text: ``data.held_out`` has the held-out rows, ``data.probe_rows`` their beginnings."""
        return prepare_data(self.config, self.cache)

    def rows(self, samples: int = 100, seq_len: int | None = None) -> Tensor:
        """Held-out text as in training, int64 ``(samples, seq_len)`` on the model's device.

        There are at most ``config.data.held_out_rows`` of them.

        Args:
            seq_len: at most the context of the training, which is the default.
        """
        length = self.config.model.max_position_embeddings if seq_len is None else seq_len
        return self.data.probe_rows(samples, length).to(self.loaded.device)
