"""Training on key-query retrieval, and what the trained head does with its weight off the trigger."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.theory.retrieval_task import BOS, RetrievalBatch, RetrievalTarget, retrieval_batch
from sinklab.trigger.model import TriggerModel
from sinklab.trigger.training import Trained, descend

__all__ = ["RetrievalReadout", "RetrievalSetting", "read_retrieval", "train_retrieval"]

EVALUATION_SEED = 1_000_003
"""Seed of the evaluated sequences; seeds of training are small numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalSetting:
    """What is trained, besides operation and seed: one layer with one head, as in Ran-Milo 2026 (arXiv 2603.11487).

    Attributes:
        length: tokens of a sequence, at least 4.
        keys: number of keys, at least ``length - 2``.
        values: coordinates of a value.
        position: 0-based place of the trigger in the evaluation.
        target: what the trigger answers; see :mod:`sinklab.theory.retrieval_task`.
        batch, learning_rate, cap, tolerance: those of the trigger task: training stops when no coordinate of the current batch
            is off by ``tolerance`` or more, or after ``cap`` steps.
    """

    length: int = 16
    keys: int = 16
    values: int = 4
    position: int = 7
    target: RetrievalTarget = "value"
    batch: int = 128
    learning_rate: float = 1e-3
    cap: int = 50_000
    tolerance: float = 5e-3

    @property
    def width(self) -> int:
        """Coordinates of a token."""
        return 3 + self.keys + self.values

    def check(self) -> None:
        """Raise before any training what would be wrong in it.

        Raises:
            ConfigurationError: a field out of its range.
        """
        self.draw(self.batch, torch.Generator(), self.position)
        if self.cap < 1:
            raise ConfigurationError(f"retrieval task: cap {self.cap} must be at least 1")
        for name, number in (("learning rate", self.learning_rate), ("tolerance", self.tolerance)):
            if not (number > 0 and math.isfinite(number)):
                raise ConfigurationError(f"retrieval task: {name} {number} must be a positive number")

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.learning_rate

    def answers(self, batch: RetrievalBatch) -> Tensor:
        """What the model is to give: the targets; one layer has no residual connection."""
        return batch.targets

    def draw(self, batch: int, generator: torch.Generator, position: int | None = None) -> RetrievalBatch:
        """Sequences of this setting; the trigger at ``position``, or anywhere."""
        return retrieval_batch(batch, self.length, self.keys, self.values, generator, position, self.target)


def train_retrieval(
    operation: Operation,
    setting: RetrievalSetting,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trained:
    """Train one model: mean squared error, Adam, fresh sequences every step. The same seed gives the same model.

    Args:
        operation: for example ``Softmax()``, or ``Relu(power=0.0)``; ReLU that is divided cannot do this task.
        progress: called with steps done and the cap.

    Raises:
        ConfigurationError: a field of the setting out of its range.
    """
    setting.check()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TriggerModel(operation, 1, 1, setting.width)
    return descend(model, setting, seed, progress)


@dataclasses.dataclass(frozen=True)
class RetrievalReadout:
    """Numbers of a model on sequences whose trigger is at one place; weights are those of its one head.

    Attributes:
        error: largest absolute error.
        before_bos_mean, before_bos_min: weight on BOS of content tokens before the trigger: mean, and the least single one.
        behind_bos_mean, behind_trigger_mean: mean weight on BOS, and on the trigger, of content tokens behind it; ``None`` for
            a trigger at the end.
        trigger_bos, trigger_asked: mean weight of the trigger on BOS, and on the token that it asks for.
    """

    error: float
    before_bos_mean: float
    before_bos_min: float
    behind_bos_mean: float | None
    behind_trigger_mean: float | None
    trigger_bos: float
    trigger_asked: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


@torch.no_grad()
def read_retrieval(
    model: TriggerModel, setting: RetrievalSetting, sequences: int = 1000, seed: int = EVALUATION_SEED
) -> RetrievalReadout:
    """Run a model over fresh sequences with the trigger at ``setting.position``."""
    at = setting.position
    batch = setting.draw(sequences, torch.Generator().manual_seed(seed), at)
    outputs, (weights,), _ = model.with_weights(batch.inputs)
    weights = weights[:, 0, len(model.front) :, len(model.front) :]
    behind = weights[:, at + 1 :]
    return RetrievalReadout(
        error=float((outputs - batch.targets).abs().max()),
        before_bos_mean=float(weights[:, 1:at, BOS].mean()),
        before_bos_min=float(weights[:, 1:at, BOS].min()),
        behind_bos_mean=float(behind[..., BOS].mean()) if behind.shape[1] else None,
        behind_trigger_mean=float(behind[..., at].mean()) if behind.shape[1] else None,
        trigger_bos=float(weights[:, at, BOS].mean()),
        trigger_asked=float(weights[:, at].gather(1, batch.asked[:, None]).mean()),
    )
