"""Bondarenko et al. 2023, Table 2: a gate on every head cuts the outliers of attention outputs at no cost in the loss."""

from __future__ import annotations

from sinklab.claims._quantisation import GATED, HALF, OUTLIERS, SAME
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Ratio

__all__ = ["gated_cuts_outliers"]


@claims.register("gated_cuts_outliers")
def gated_cuts_outliers() -> Claim:
    """Published for encoders and decoders alike: a linear gate on every head, a quarter open at the start."""
    return Claim(
        statement="With a gate on the output of every head, by which it can do nothing, the outliers of attention outputs "
        "go, and the loss does not rise.",
        source="bondarenko2023",
        reference="Bondarenko et al. 2023 (arXiv 2306.12929), Table 2",
        published="OPT-125m: largest infinity norm 340 to 8.7, kurtosis 1778 to 18.9, perplexity 15.84 to 15.55; BERT-base: "
        "735 to 39.2, 3076 to 201, 4.49 to 4.45.",
        presupposes=(OUTLIERS,),
        parts=(
            Part("the largest norm falls", Ratio("max_inf_norm", GATED.label, BASELINE), less_than=HALF),
            Part("the kurtosis falls", Ratio("kurtosis", GATED.label, BASELINE), less_than=HALF),
            Part("the loss does not rise", Difference("held_out_loss", GATED.label, BASELINE), less_than=SAME),
        ),
        variants=(Variant(BASELINE), GATED),
        read_outs=("outliers",),
    )
