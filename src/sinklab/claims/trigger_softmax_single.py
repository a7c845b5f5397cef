"""Ran-Milo 2026, Theorem 1: one softmax head that solves the trigger task puts its weight on BOS off the trigger."""

from __future__ import annotations

from sinklab.claims._trigger import SOLVED, trained_numbers
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part, Scale
from sinklab_claims.contract.effect import Numbers, Trend, Value

__all__ = ["trigger_softmax_single"]

TOLERANCES = {"softmax to 0.1": 0.1, "softmax to 0.03": 0.03, "softmax": 5e-3}
"""Label of a variant to the largest error on a batch at which its training stops; the last is the paper's."""

LEAST = 0.99
"""``1 - 2 η`` at the paper's tolerance: what a value map that leaves the count of tokens alone would need."""


def measure(seed: int, scale: Scale) -> Numbers:
    """One head of width 16, trained from the same start to three tolerances."""
    return {label: trained_numbers("softmax", seed, tolerance=tolerance) for label, tolerance in TOLERANCES.items()}


@claims.register("trigger_softmax_single")
def trigger_softmax_single() -> Claim:
    """At every single query off the trigger, and the more so the smaller the error."""
    return Claim(
        statement="One softmax head that solves the trigger task puts almost all weight of every query off the trigger on BOS, "
        "and more of it the smaller its error.",
        source="ranmilo2026",
        reference="Ran-Milo 2026 (arXiv 2603.11487), Theorem 1, Figure 3",
        published="At least 1 - ε on BOS at every position but the trigger, where ε goes to 0 with the loss; the map drawn "
        "shows about 1, with a standard deviation of about 0.",
        presupposes=(Part("the task is learned", Value("max_error", "softmax"), less_than=SOLVED),),
        parts=(
            Part("every query off the trigger is on BOS", Value("bos_weight_min", "softmax"), more_than=LEAST),
            Part("the weight grows as the error falls", Trend("bos_weight_min", tuple(TOLERANCES)), more_than=0.5),
        ),
        measure=measure,
        costs={"tiny": "seconds"},
    )
