"""Ran-Milo 2026, Figures 4 and 6: trained models of several layers and heads of softmax have a head that sinks."""

from __future__ import annotations

from sinklab.claims._trigger import DEEP, SOLVED, trained_numbers
from sinklab.registry import claims
from sinklab.studies.trigger.evaluation import SINK
from sinklab_claims.contract.claim import Claim, Part, Scale
from sinklab_claims.contract.effect import Numbers, Value

__all__ = ["trigger_softmax_deep"]


def measure(seed: int, scale: Scale) -> Numbers:
    """Two layers of two heads, or four of four."""
    return {"softmax": trained_numbers("softmax", seed, layers=DEEP[scale], heads=DEEP[scale])}


@claims.register("trigger_softmax_deep")
def trigger_softmax_deep() -> Claim:
    """About what training finds, and about some head: how many sink, and which, is recorded and not judged.

    Theorem 2 says less than "every solution has a head that sinks off the trigger": ``cancelling_solution`` (docs/theory.md)
    solves the task with even weights there, and sinks at one head and query. No training that we know of finds it.
    """
    return Claim(
        statement="Softmax models of several layers and heads that training has brought to solve the trigger task have a head "
        "that sinks on BOS off the trigger.",
        source="ranmilo2026",
        reference="Ran-Milo 2026 (arXiv 2603.11487), Theorem 2, Figures 4 and 6",
        published="Proved: at least one layer and position must sink; drawn are four of four heads that sink in two layers of "
        "two, and eight of sixteen in four layers of four.",
        presupposes=(Part("the task is learned", Value("max_error", "softmax"), less_than=SOLVED),),
        parts=(Part("some head sinks", Value("head_bos_weight_largest", "softmax"), more_than=SINK),),
        measure=measure,
        costs={"tiny": "minutes", "small": "hours"},
    )
