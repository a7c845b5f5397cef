"""Ran-Milo 2026, Theorem 3: ReLU attention solves the trigger task with no weight on BOS off the trigger."""

from __future__ import annotations

import torch

from sinklab.claims._trigger import DEEP, SOLVED, trained_numbers
from sinklab.registry import claims
from sinklab.studies.theory.trigger_bounds import relu_solution
from sinklab.studies.theory.trigger_task import trigger_batch
from sinklab_claims.contract.claim import Claim, Part, Scale
from sinklab_claims.contract.effect import Extreme, Numbers, Value

__all__ = ["trigger_relu"]

EXACT = 1e-6
"""Targets are float32: means of at most 15 numbers below 1, each sum rounded by at most 15 · 6e-8 = 9e-7 of its terms."""

SILENT = 0.01
"""Mean weight on BOS below which a trained head is silent; even weights would be 0.16."""

TRAINED = ("one head", "several heads")


def measure(seed: int, scale: Scale) -> Numbers:
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
def trigger_relu() -> Claim:
    """Exactly 0 for weights set by hand, and next to nothing in every head for trained ones."""
    return Claim(
        statement="ReLU attention can solve the trigger task exactly with no weight on BOS, and trained on it no head sinks.",
        source="ranmilo2026",
        reference="Ran-Milo 2026 (arXiv 2603.11487), Theorem 3, Figures 3, 5, 7 and 8",
        published="A solution with a loss of 0 and no weight on BOS; in the maps of trained models only the row of the trigger "
        "is not 0, at one head as at four and sixteen.",
        presupposes=(Part("the task is learned", Extreme("max_error", TRAINED), less_than=SOLVED),),
        parts=(
            Part("the solution is exact", Value("max_error", "solution"), less_than=EXACT, proved=True),
            Part("it gives BOS nothing", Value("bos_weight_largest", "solution"), less_than=EXACT, proved=True),
            Part("no trained head sinks", Extreme("head_bos_weight_largest", TRAINED), less_than=SILENT),
        ),
        measure=measure,
        costs={"tiny": "minutes", "small": "hours"},
    )
