"""Guo et al. 2024: sinks, unlike outliers, are not Adam's; trained by SGD, a model has a sink as well."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_sink
from sinklab.claims._sgd import SGD, SGD_FAST
from sinklab.jobs.claim import BASELINE, Claim, Difference, Part
from sinklab.registry import claims

__all__ = ["sgd_keeps_the_sink"]


@claims.register("sgd_keeps_the_sink")
def sgd_keeps_the_sink() -> Claim:
    """At the rate at which SGD learns best; the faster one is recorded beside it and not judged."""
    return Claim(
        statement="Trained by SGD instead of Adam, a model that learns as well has a sink too.",
        source="guo2024",
        reference="Guo et al. 2024 (arXiv 2410.13835)",
        published="From Adam to SGD residual peaks vanish and sinks stay.",
        presupposes=(
            has_sink(),
            Part("SGD learns as well", Difference("held_out_loss", SGD.label, BASELINE), less_than=0.1),
        ),
        parts=(has_sink(SGD.label),),
        variants=(UNCHANGED, SGD, SGD_FAST),
        read_outs=("sinks",),
    )
