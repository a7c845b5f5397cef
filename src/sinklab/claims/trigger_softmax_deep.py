"""Ran-Milo 2026, Theorem 2: with several layers and heads of softmax some head must sink; it need not be every one."""

from __future__ import annotations

from sinklab.claims._trigger import DEEP, SOLVED, trained_numbers
from sinklab.jobs.claim import Claim, Numbers, Part, Scale, Value
from sinklab.registry import claims
from sinklab.studies.trigger.evaluation import SINK

__all__ = ["trigger_softmax_deep"]


def measure(seed: int, scale: Scale) -> Numbers:
    """Two layers of two heads, or four of four."""
    return {"softmax": trained_numbers("softmax", seed, layers=DEEP[scale], heads=DEEP[scale])}


@claims.register("trigger_softmax_deep")
def trigger_softmax_deep() -> Claim:
    """Existential: how many heads sink, and which, is recorded and not judged, since the theorem does not say."""
    return Claim(
        statement="A softmax model of several layers and heads that solves the trigger task has a head that sinks on BOS off "
        "the trigger.",
        source="ranmilo2026",
        reference="Ran-Milo 2026 (arXiv 2603.11487), Theorem 2, Figures 4 and 6",
        published="At least one layer and position must sink; drawn are four of four heads that sink in two layers of two, and "
        "eight of sixteen in four layers of four.",
        presupposes=(Part("the task is learned", Value("max_error", "softmax"), less_than=SOLVED),),
        parts=(Part("some head sinks", Value("head_bos_weight_largest", "softmax"), more_than=SINK),),
        measure=measure,
        costs={"tiny": "minutes", "small": "hours"},
    )
