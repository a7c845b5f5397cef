"""The toy problem of key-query retrieval, and what a head that was trained on it does with its weight off the trigger."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import torch

from sinklab.attention.operation import Operation
from sinklab.results.metric import Metric, Row
from sinklab.results.table import finite
from sinklab.studies.theory.retrieval_task import BOS, RetrievalBatch, RetrievalTarget, divisor_error, retrieval_batch
from sinklab.studies.trigger.evaluation import EVALUATION_SEED, MAX_ERROR
from sinklab.studies.trigger.model import TriggerModel
from sinklab.studies.trigger.problem import ToyProblem, divisor_quotient, linear_in_values

METRICS = (
    Metric("before_bos_mean", "weight", "Mean weight on BOS of content tokens before the trigger."),
    Metric("before_bos_min", "weight", "Least single weight on BOS of content tokens before the trigger.", over_seeds="min"),
    Metric("behind_bos_mean", "weight", "Mean weight on BOS of content tokens behind the trigger."),
    Metric("behind_trigger_mean", "weight", "Mean weight on the trigger of content tokens behind it."),
    Metric("trigger_bos", "weight", "Mean weight of the trigger on BOS."),
    Metric("trigger_asked", "weight", "Mean weight of the trigger on the token that it asks for."),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalProblem(ToyProblem):
    """Key-query retrieval for one layer with one head; fields are arguments of ``retrieval()``."""

    name: ClassVar[str] = "retrieval"
    described: ClassVar[tuple[str, ...]] = ("target",)
    hint: ClassVar[str] = "relu:power=0 is not divided. "

    keys: int = 16
    values: int = 4
    target: RetrievalTarget = "value"

    @property
    def columns(self) -> dict[str, str | int]:
        return {"model": "retrieval 1x1", "corpus": f"retrieval_task {self.target}", "bos": 1}

    def draw(self, batch: int, generator: torch.Generator, position: int | None = None) -> RetrievalBatch:
        return retrieval_batch(batch, self.length, self.keys, self.values, generator, position, self.target)

    def untrained(self, operation: Operation) -> TriggerModel:
        return TriggerModel(operation, width=3 + self.keys + self.values)


@dataclasses.dataclass(frozen=True)
class RetrievalNumbers:
    """Numbers of a model on samples whose trigger is at one position, see ``METRICS``; ``None`` for a trigger at the end."""

    max_error: float
    before_bos_mean: float
    before_bos_min: float
    behind_bos_mean: float | None
    behind_trigger_mean: float | None
    trigger_bos: float
    trigger_asked: float

    def to_dict(self) -> dict[str, object]:
        """For a record."""
        return {name: None if value is None else finite(value) for name, value in dataclasses.asdict(self).items()}

    def rows(self) -> Iterator[Row]:
        """Rows of the table."""
        for metric in (MAX_ERROR, *METRICS):
            if getattr(self, metric.name) is not None:
                yield {"metric": metric, "value": getattr(self, metric.name), "layer": 0, "head": 0}


@torch.no_grad()
def evaluate_retrieval(model: TriggerModel, problem: RetrievalProblem, samples: int = 1000) -> RetrievalNumbers:
    """Run a model over fresh samples with the trigger at ``problem.position``."""
    at = problem.position
    batch = problem.draw(samples, torch.Generator().manual_seed(EVALUATION_SEED), at)
    outputs, (weights,), _ = model.with_weights(batch.inputs)
    weights = weights[:, 0, len(model.front) :, len(model.front) :]
    behind = weights[:, at + 1 :]
    return RetrievalNumbers(
        max_error=float((outputs - batch.targets).abs().max()),
        before_bos_mean=float(weights[:, 1:at, BOS].mean()),
        before_bos_min=float(weights[:, 1:at, BOS].min()),
        behind_bos_mean=float(behind[..., BOS].mean()) if behind.shape[1] else None,
        behind_trigger_mean=float(behind[..., at].mean()) if behind.shape[1] else None,
        trigger_bos=float(weights[:, at, BOS].mean()),
        trigger_asked=float(weights[:, at].gather(1, batch.asked[:, None]).mean()),
    )


def retrieval_obstacle(operation: Operation, problem: RetrievalProblem) -> tuple[str, float] | None:
    """Why no maps solve the problem with weights that are divided by a number of keys, and the least error; or ``None``.

    The proof is in :mod:`sinklab.studies.theory.retrieval_task`.
    """
    quotient = divisor_quotient(operation, 3) if linear_in_values(operation) else None
    error = 0.0 if quotient is None else divisor_error(1.0, quotient)
    if error <= problem.tolerance:
        return None
    return "its weights are divided by the number of visible keys, and one value is to be given whatever their number", error
