"""Bondarenko et al. 2023, Table 1: the further clipped softmax is stretched below zero, the smaller the largest outlier."""

from __future__ import annotations

from sinklab.claims._quantisation import OUTLIERS, clipped
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Trend

__all__ = ["gamma_sweep"]

SWEEP = (clipped(0.64), clipped(1.92), clipped(3.2))
"""BERT's gamma of -0.005, -0.015 and -0.025 at length 128."""

FALLS = -0.5
"""Rank correlation over four values; published is -1, and one pair of neighbours in the wrong order makes -0.8."""


@claims.register("gamma_sweep")
def gamma_sweep() -> Claim:
    """The baseline is gamma 0: stretched to nowhere, nothing is clipped."""
    return Claim(
        statement="The largest outlier falls as gamma of the clipped softmax falls from 0 to -3.2 over the length.",
        source="bondarenko2023",
        reference="Bondarenko et al. 2023 (arXiv 2306.12929), Tables 1 and 2",
        published="BERT-base, largest infinity norm at gamma 0, -0.005, -0.01, -0.015, -0.02, -0.025: 735, 407, 198, 38.9, "
        "31.7, 21.5.",
        presupposes=(OUTLIERS,),
        parts=(
            Part(
                "the largest norm falls with gamma",
                Trend("max_inf_norm", (BASELINE, *(variant.label for variant in SWEEP))),
                less_than=FALLS,
            ),
        ),
        variants=(Variant(BASELINE), *SWEEP),
        read_outs=("outliers",),
    )
