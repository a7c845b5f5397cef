"""What the claims about the trigger task share: one training run of the trigger lab as numbers of a variant."""

from __future__ import annotations

from typing import Any

from sinklab.results.metric import Metric
from sinklab.studies.trigger.trigger import trigger
from sinklab_claims.contract.claim import Scale

__all__ = ["DEEP", "METRICS", "SOLVED", "trained_numbers"]

METRICS = (
    Metric(
        "bos_weight_bound",
        "weight",
        "Least weight on BOS off the trigger that mass counting leaves possible.",
        over_seeds="min",
    ),
    Metric("bos_weight_largest", "weight", "Largest single weight on BOS off the trigger.", over_seeds="max"),
    Metric("head_bos_weight_largest", "weight", "Mean weight on BOS off the trigger, of the head that gives it most."),
    Metric("head_bos_weight_smallest", "weight", "Mean weight on BOS off the trigger, of the head that gives it least."),
    Metric("sinking_heads", "heads", "Heads whose mean weight on BOS off the trigger is 0.9 or more."),
)

DEEP: dict[Scale, int] = {"tiny": 2, "small": 4}
"""Layers, and heads of each, of the models with more than one head: the two shapes of the paper."""

SOLVED = 0.02
"""Largest error on fresh samples of a model that has learned the task; training stops at 0.005 on a batch of 128."""


def trained_numbers(operation: str, seed: int, **fields: Any) -> dict[str, float]:
    """Train one model and evaluate it on 1,000 samples.

    Args:
        operation: name, as the paper's models have it.
        fields: arguments of :func:`~sinklab.studies.trigger.trigger.trigger`.

    Returns:
        ``steps``; ``max_error``; ``bos_weight_mean`` and ``bos_weight_min``, mean and least weight on BOS off the trigger of
        the head that gives it most; ``head_bos_weight_largest`` and ``head_bos_weight_smallest``, the mean of the head with
        the largest and with the smallest one; ``sinking_heads``, how many have a mean of 0.9 or more; ``bos_weight_bound``,
        what mass counting leaves possible. What a model has not, or what is not finite, is absent.
    """
    record = trigger(operation=operation, seeds=[seed], **fields).summary["runs"][0]
    numbers = {name: record[name] for name in ("steps", "max_error", "bos_weight_mean", "bos_weight_min", "bos_weight_bound")}
    by_head = record["head_bos_weight_mean"]
    if by_head is not None:
        means = [mean for layer in by_head for mean in layer]
        numbers |= {
            "head_bos_weight_largest": max(means),
            "head_bos_weight_smallest": min(means),
            "sinking_heads": len(record["sinking_heads"]),
        }
    return {name: float(number) for name, number in numbers.items() if number is not None}
