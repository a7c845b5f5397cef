"""What the claims about entropy collapse share: learning rates that are large and too large, and how a run under them went."""

from __future__ import annotations

import math

from sinklab.read_outs.training import numbers_of_table
from sinklab.results.metric import Metric
from sinklab_claims.contract.claim import BASELINE, Part, Times, Variant
from sinklab_claims.contract.effect import Difference
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["BASE", "COLLAPSED", "HARM", "LARGE", "METRICS", "TOO_LARGE", "TOO_LARGE_SIGMA", "course", "is_too_large"]

METRICS = (
    Metric("least_loss", "nats", "Least training loss on record.", over_seeds="min"),
    Metric("least_entropy", "nats", "Least mean entropy of attention on the probe rows of the training.", over_seeds="min"),
    Metric("spikes", "count", "loss_spikes, of trainings that diverged too."),
)

COLLAPSED = 0.5
"""Nats of mean entropy below which it has collapsed: as much as even weights on 1.6 keys have."""

HARM = 0.1
"""Nats by which the loss must be worse for training to be called harmed."""

BASE = Variant(BASELINE)
LARGE = Variant("rate x4", {"optimizer.learning_rate": Times(4)})
TOO_LARGE = Variant("rate x16", {"optimizer.learning_rate": Times(16)})
TOO_LARGE_SIGMA = Variant(
    "rate x16, sigma_reparam", {"optimizer.learning_rate": Times(16), "model.operation": {"name": "sigma_reparam"}}
)


def course(trained: TrainedModel) -> dict[str, float]:
    """How a training went, of those that diverged too: ``least_loss``, ``least_entropy``, ``spikes``.

    ``least_loss`` is the least training loss on record, in nats, ``least_entropy`` the least mean entropy of attention on the
    probe rows, in nats, and ``spikes`` counts records of the loss more than half a nat above the least one before.
    """
    config, table = trained.config, trained.table
    of_table = numbers_of_table(table, steps=config.training.steps, warmup_steps=config.schedule.warmup_steps)
    losses = table.loc[table["metric"] == "train_loss", "value"].astype(float)
    numbers = {"least_loss": float(losses.min()), "spikes": of_table["loss_spikes"]}
    if "entropy_least" in of_table:
        numbers["least_entropy"] = of_table["entropy_least"]
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


course.of_diverged = True  # type: ignore[attr-defined]


def is_too_large() -> Part:
    """What the claims about the largest rate presuppose."""
    return Part("the rate is too large for softmax", Difference("least_loss", TOO_LARGE.label, BASELINE), more_than=HARM)
