"""Bondarenko et al. 2023, low bits: with six bits, too, models with gated heads lose far less than plain ones."""

from __future__ import annotations

from sinklab.claims._quantisation import GATED, OUTLIERS, SAME
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Value

__all__ = ["six_bit_gap_falls"]


@claims.register("six_bit_gap_falls")
def six_bit_gap_falls() -> Claim:
    """Ranges are from the smallest to the largest value; the paper's search for better ones is not tried."""
    return Claim(
        statement="Gated heads also take away most of what weights of six bits cost, with activations of eight bits or of six.",
        source="bondarenko2023",
        reference="Bondarenko et al. 2023 (arXiv 2306.12929), results at low bits",
        published="BERT-base, perplexity of the plain and the gated model: W6A8 598 and 4.79, W6A6 42.8 and 5.90; in floating "
        "point 4.49 and 4.45.",
        presupposes=(
            OUTLIERS,
            Part("the baseline loses by six bits", Value("w6a6_gap", BASELINE), more_than=SAME),
        ),
        parts=(
            Part("W6A8 costs less", Difference("w6a8_gap", BASELINE, GATED.label), more_than=SAME),
            Part("W6A6 costs less", Difference("w6a6_gap", BASELINE, GATED.label), more_than=SAME),
        ),
        variants=(Variant(BASELINE), GATED),
        read_outs=("low_bits", "outliers"),
    )
