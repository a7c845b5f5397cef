"""Bondarenko et al. 2023, Table 2: on a decoder, OPT, clipped softmax makes kurtosis, loss and the loss by eight bits worse."""

from __future__ import annotations

from sinklab.claims._quantisation import OUTLIERS, SAME, clipped
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Ratio

__all__ = ["clipped_fails_on_decoders"]

CLIPPED = clipped(12)
"""OPT's gamma of -12/512."""


@claims.register("clipped_fails_on_decoders")
def clipped_fails_on_decoders() -> Claim:
    """The exception that the paper reports of its own method: OPT, with OPT's gamma for the context of the scale."""
    return Claim(
        statement="On a decoder clipped softmax fails: the kurtosis of attention outputs rises, and so do the loss and what "
        "eight bits cost.",
        source="bondarenko2023",
        reference="Bondarenko et al. 2023 (arXiv 2306.12929), Table 2",
        published="OPT-125m: kurtosis 1778 to 19728, perplexity 15.84 to 16.29 (+0.028 nats), in eight bits 21.18 to 37.20; "
        "the largest infinity norm falls from 340 to 63.",
        presupposes=(OUTLIERS,),
        parts=(
            Part("the kurtosis rises", Ratio("kurtosis", CLIPPED.label, BASELINE), more_than=2.0),
            Part("the loss rises", Difference("held_out_loss", CLIPPED.label, BASELINE), more_than=SAME),
            Part("eight bits cost more", Difference("int8_gap", CLIPPED.label, BASELINE), more_than=SAME),
        ),
        variants=(Variant(BASELINE), CLIPPED),
        read_outs=("outliers", "int8"),
    )
