"""Bondarenko et al. 2023, Table 2: clipped softmax cuts the outliers of attention outputs at no cost in the loss."""

from __future__ import annotations

from sinklab.claims._quantisation import HALF, OUTLIERS, SAME, clipped
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Ratio

__all__ = ["clipped_cuts_outliers"]

CLIPPED = clipped(3.2)
"""BERT's gamma of -0.025 at length 128."""


@claims.register("clipped_cuts_outliers")
def clipped_cuts_outliers() -> Claim:
    """What the paper finds for BERT and ViT; for OPT it finds the contrary, which is a claim of its own."""
    return Claim(
        statement="Clipped softmax, which lets a head do nothing by exact zeros, cuts the outliers of attention outputs and "
        "leaves the loss as it is (published for BERT and ViT; here tried on decoders).",
        source="bondarenko2023",
        reference="Bondarenko et al. 2023 (arXiv 2306.12929), Table 2",
        published="BERT-base: largest infinity norm 735 to 21.5, kurtosis 3076 to 80, perplexity 4.49 to 4.39; ViT-S/16: 359 "
        "to 73.7, 1018 to 22.9, accuracy 80.75 to 80.89 %.",
        presupposes=(OUTLIERS,),
        parts=(
            Part("the largest norm falls", Ratio("max_inf_norm", CLIPPED.label, BASELINE), less_than=HALF),
            Part("the kurtosis falls", Ratio("kurtosis", CLIPPED.label, BASELINE), less_than=HALF),
            Part("the loss does not rise", Difference("held_out_loss", CLIPPED.label, BASELINE), less_than=SAME),
        ),
        variants=(Variant(BASELINE), CLIPPED),
        read_outs=("outliers",),
    )
