"""Embedded models as read-outs see trained ones: the weights that come with the package, and texts that a seed draws."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sinklab.jobs.trained import TrainedModel
from sinklab.models.loading import LoadedModel, load_model
from sinklab.registry import corpora, read_outs
from sinklab.training.config import PretrainingConfig

__all__ = ["SINGLE", "EmbeddedModel", "numbers_of"]

SINGLE = (
    "one trained model of 1.5 million parameters; a seed is a draw of 100 texts, so intervals are over texts, not trainings"
)
"""Said of every claim that rests on these numbers."""


class EmbeddedModel(TrainedModel):
    """An embedded model and rows of held-out Python source, each from a random line on.

    Args:
        name: ``embedded:softmax`` or ``embedded:sigmoid``.
        seed: of the draw of the texts.
    """

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(Path(name), Path(name))
        self.name, self.seed = name, seed

    @functools.cached_property
    def config(self) -> PretrainingConfig:
        """Its architecture; how it was trained is in ``models/embedded_checkpoints``."""
        return PretrainingConfig(name=self.name, model=self.loaded.model.config.architecture)

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        """The model, float32 on a CPU, in evaluation mode."""
        return load_model(self.name)

    def rows(self, samples: int = 100, seq_len: int | None = None) -> Tensor:
        """Texts of at least ``seq_len`` tokens, cut there, BOS in front; int64 ``(samples, seq_len)`` on the model's device."""
        length = self.config.model.max_position_embeddings if seq_len is None else seq_len
        rows: list[list[int]] = []
        tokenizer = self.loaded.tokenizer
        assert tokenizer is not None  # the checkpoint was written with it
        for text in corpora["python_source"]().passages(self.seed):
            ids = tokenizer(text[: 16 * length])["input_ids"]
            if len(ids) >= length:
                rows.append(ids[:length])
            if len(rows) == samples:
                break
        return torch.tensor(rows, device=self.loaded.device)


def numbers_of(name: str, seed: int, *wanted: str) -> Mapping[str, float]:
    """What read-outs say of an embedded model on the texts of a seed."""
    trained = EmbeddedModel(name, seed)
    numbers: dict[str, float] = {}
    for read_out in wanted:
        numbers |= read_outs[read_out](trained)
    return numbers
