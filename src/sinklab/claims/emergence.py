"""Emergence: a model at its start has no sink; one comes early in training and grows."""

from __future__ import annotations

from sinklab.claims._architecture import SINK, UNCHANGED
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Difference, Value

__all__ = ["emergence"]

NOTHING = 1.0
"""Percent below which a model that has learned nothing must lie."""

BASE = UNCHANGED.label


@claims.register("emergence")
def emergence() -> Claim:
    """The first token's rate over one run: before the first step, when the learning rate has reached its height, at the end.

    Shares of the steps do not compare: warm-up is a two-hundredth of them in the paper, and a sixth at the smallest scale.
    """
    return Claim(
        statement="The sink is not there at initialisation: it emerges during training and grows with the steps.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 4",
        published="The sink appears between 1,000 and 2,000 of 20,000 steps and grows from there to a rate of 18.18.",
        variants=(UNCHANGED,),
        bases=("no-bos", "bos"),
        read_outs=("training",),
        parts=(
            Part("there is none before the first step", Value("sink_rate_start", BASE), less_than=NOTHING),
            Part("there is one after the last step", Value("sink_rate_end", BASE), more_than=SINK),
            Part(
                "it grows after warm-up",
                Difference("sink_rate_end", BASE, BASE, other="sink_rate_warm"),
                more_than=SINK,
            ),
        ),
    )
