"""Bondarenko et al. 2023, Table 1: stretching the softmax above one and not below zero leaves the outliers where they are."""

from __future__ import annotations

from sinklab.claims._quantisation import HALF, OUTLIERS
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Ratio

__all__ = ["stretching_up_does_not_help"]

STRETCHED = Variant(
    "stretched softmax, zeta 1.03", {"model.operation": {"name": "clipped_softmax", "gamma": 0.0, "zeta": 1.03}}
)


@claims.register("stretching_up_does_not_help")
def stretching_up_does_not_help() -> Claim:
    """An exact one needs no head that does nothing; an exact zero does."""
    return Claim(
        statement="Only zeros help: a softmax that reaches one at a finite score, but not zero, has outliers like the plain "
        "one.",
        source="bondarenko2023",
        reference="Bondarenko et al. 2023 (arXiv 2306.12929), Table 1",
        published="BERT-base with zeta 1.003 and 1.03 at gamma 0: no improvement; gamma is what counts.",
        presupposes=(OUTLIERS,),
        parts=(
            Part("the largest norm stays", Ratio("max_inf_norm", STRETCHED.label, BASELINE), more_than=HALF),
            Part("the kurtosis stays", Ratio("kurtosis", STRETCHED.label, BASELINE), more_than=HALF),
        ),
        variants=(Variant(BASELINE), STRETCHED),
        read_outs=("outliers",),
    )
