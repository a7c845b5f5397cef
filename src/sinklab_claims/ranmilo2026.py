"""Ran-Milo 2026: the trigger task, which one softmax head solves with a sink alone, and ReLU without one."""

from __future__ import annotations

from typing import Any

import torch

from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.studies.theory.trigger_bounds import relu_solution, trigger_batch
from sinklab.studies.trigger.lab import SINK
from sinklab.studies.trigger.trigger import trigger
from sinklab_claims.contract.claim import Part, Scale
from sinklab_claims.contract.effect import Extreme, Numbers, Trend, Value
from sinklab_claims.variants import Fields, of_paper

ran_milo = of_paper("ranmilo2026", "Ran-Milo 2026 (arXiv 2603.11487)")

METRICS = (
    Metric("bos_weight_largest", "weight", "Largest single weight on BOS off the trigger."),
    Metric("head_bos_weight_largest", "weight", "Mean weight on BOS off the trigger, of the head that gives it most."),
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
        the head that gives it most; and :data:`METRICS`. What a model has not, or what is not finite, is absent.
    """
    record = trigger(operation=operation, seeds=[seed], **fields).summary["runs"][0]
    numbers = {name: record[name] for name in ("steps", "max_error", "bos_weight_mean", "bos_weight_min")}
    by_head = record["head_bos_weight_mean"]
    if by_head is not None:
        means = [mean for layer in by_head for mean in layer]
        numbers |= {"head_bos_weight_largest": max(means), "sinking_heads": len(record["sinking_heads"])}
    return {name: float(number) for name, number in numbers.items() if number is not None}


TOLERANCES = {"softmax to 0.1": 0.1, "softmax to 0.03": 0.03, "softmax": 5e-3}
"""Label of a variant to the largest error on a batch at which its training stops; the last is the paper's."""

LEAST = 0.99
"""``1 - 2 η`` at the paper's tolerance: what a value map that leaves the count of tokens alone would need."""


def of_one_head(seed: int, scale: Scale) -> Numbers:
    """One head of width 16, trained from the same start to three tolerances."""
    return {label: trained_numbers("softmax", seed, tolerance=tolerance) for label, tolerance in TOLERANCES.items()}


@claims.register("trigger_softmax_single")
@ran_milo
def trigger_softmax_single() -> Fields:
    """One softmax head that solves the trigger task puts almost all weight of every query off the trigger on BOS, and more of
    it the smaller its error."""
    return dict(
        where="Theorem 1, Figure 3",
        published="At least 1 - ε on BOS at every position but the trigger, where ε goes to 0 with the loss; the map drawn "
        "shows about 1, with a standard deviation of about 0.",
        presupposes=(Part("the task is learned", Value("max_error", "softmax"), less_than=SOLVED),),
        parts=(
            Part("every query off the trigger is on BOS", Value("bos_weight_min", "softmax"), more_than=LEAST),
            Part("the weight grows as the error falls", Trend("bos_weight_min", tuple(TOLERANCES)), more_than=0.5),
        ),
        measure=of_one_head,
        costs={"tiny": "seconds"},
    )


def of_several_heads(seed: int, scale: Scale) -> Numbers:
    """Two layers of two heads, or four of four."""
    return {"softmax": trained_numbers("softmax", seed, layers=DEEP[scale], heads=DEEP[scale])}


@claims.register("trigger_softmax_deep")
@ran_milo
def trigger_softmax_deep() -> Fields:
    """Softmax models of several layers and heads that training has brought to solve the trigger task have a head that sinks on
    BOS off the trigger.

    About what training finds, and about some head: how many sink, and which, is recorded and not judged. Theorem 2 says less
    than "every solution has a head that sinks off the trigger": ``cancelling_solution`` (docs/theory.md) solves the task with
    even weights there, and sinks at one head and query. No training that we know of finds it.
    """
    return dict(
        where="Theorem 2, Figures 4 and 6",
        published="Proved: at least one layer and position must sink; drawn are four of four heads that sink in two layers of "
        "two, and eight of sixteen in four layers of four.",
        presupposes=(Part("the task is learned", Value("max_error", "softmax"), less_than=SOLVED),),
        parts=(Part("some head sinks", Value("head_bos_weight_largest", "softmax"), more_than=SINK),),
        measure=of_several_heads,
        costs={"tiny": "minutes", "small": "hours"},
    )


EXACT = 1e-6
"""Targets are float32: means of at most 15 numbers below 1, each sum rounded by at most 15 · 6e-8 = 9e-7 of its terms."""

SILENT = 0.01
"""Mean weight on BOS below which a trained head is silent; even weights would be 0.16."""


def of_relu(seed: int, scale: Scale) -> Numbers:
    """The weights that solve the task, on sequences of this seed, and two models trained from small maps."""
    batch = trigger_batch(1000, 16, 16, torch.Generator().manual_seed(seed))
    inputs, targets = batch.inputs.double(), batch.targets.double()
    outputs, weights = relu_solution(16)(inputs)
    off = ~batch.is_trigger
    return {
        "solution": {
            "max_error": float((outputs - targets).abs().max()),
            "bos_weight_largest": float(weights[:, 0, :, 0][off].abs().max()),
        },
        "one head": trained_numbers("relu", seed),
        "several heads": trained_numbers("relu", seed, layers=DEEP[scale], heads=DEEP[scale]),
    }


@claims.register("trigger_relu")
@ran_milo
def trigger_relu() -> Fields:
    """ReLU attention can solve the trigger task exactly with no weight on BOS, and trained on it no head sinks.

    Exactly 0 for weights set by hand, and next to nothing in every head for trained ones.
    """
    trained = ("one head", "several heads")
    return dict(
        where="Theorem 3, Figures 3, 5, 7 and 8",
        published="A solution with a loss of 0 and no weight on BOS; in the maps of trained models only the row of the trigger "
        "is not 0, at one head as at four and sixteen.",
        presupposes=(Part("the task is learned", Extreme("max_error", trained), less_than=SOLVED),),
        parts=(
            Part("the solution is exact", Value("max_error", "solution"), less_than=EXACT, proved=True),
            Part("it gives BOS nothing", Value("bos_weight_largest", "solution"), less_than=EXACT, proved=True),
            Part("no trained head sinks", Extreme("head_bos_weight_largest", trained), less_than=SILENT),
        ),
        measure=of_relu,
        costs={"tiny": "minutes", "small": "hours"},
    )
