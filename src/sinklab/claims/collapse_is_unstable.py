"""Zhai et al. 2023: where the entropy of attention has collapsed, training is unstable."""

from __future__ import annotations

from sinklab.claims._rates import BASE, COLLAPSED, HARM, LARGE, course
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part
from sinklab_claims.contract.effect import Difference, Value

__all__ = ["collapse_is_unstable"]


@claims.register("collapse_is_unstable")
def collapse_is_unstable() -> Claim:
    """The other way round from ``entropy_collapse``: a rate at which the entropy collapses, and what becomes of the loss."""
    return Claim(
        statement="Training in which the entropy of attention collapses does worse for it.",
        source="zhai2023",
        reference="Zhai et al. 2023 (arXiv 2303.06296), section 3",
        published="Pathologically low entropy goes with oscillating or diverging losses in vision, translation, speech and "
        "language models.",
        presupposes=(Part("the entropy collapses", Value("least_entropy", LARGE.label), less_than=COLLAPSED),),
        parts=(Part("the loss is worse", Difference("least_loss", LARGE.label, BASELINE), more_than=HARM),),
        variants=(BASE, LARGE),
        read_outs=(course,),
    )
