"""Zhai et al. 2023: under a learning rate that is too large, the entropy of attention collapses."""

from __future__ import annotations

from sinklab.claims._rates import BASE, COLLAPSED, TOO_LARGE, course, is_too_large
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part
from sinklab_claims.contract.effect import Difference, Value

__all__ = ["entropy_collapse"]


@claims.register("entropy_collapse")
def entropy_collapse() -> Claim:
    """The least mean entropy over training. A sink lowers it too, so that stable training is set beside it."""
    return Claim(
        statement="A learning rate that is too large to train well makes the entropy of attention collapse on the way.",
        source="zhai2023",
        reference="Zhai et al. 2023 (arXiv 2303.06296), section 3",
        published="Pathologically low entropy goes with oscillating or diverging losses in vision, translation, speech and "
        "language models.",
        presupposes=(is_too_large(),),
        parts=(
            Part("the entropy collapses", Value("least_entropy", TOO_LARGE.label), less_than=COLLAPSED),
            Part("it falls far", Difference("least_entropy", TOO_LARGE.label, BASELINE), less_than=-0.5),
        ),
        variants=(BASE, TOO_LARGE),
        read_outs=(course,),
    )
