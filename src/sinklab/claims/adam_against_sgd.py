"""Guo et al. 2024 and Kaul et al. 2024: the outliers are Adam's; trained by SGD, the first token has none."""

from __future__ import annotations

from sinklab.claims._architecture import MASSIVE
from sinklab.claims._sgd import ADAM, SGD, adam_and_sgd, learns
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Value

__all__ = ["adam_against_sgd"]


@claims.register("adam_against_sgd")
def adam_against_sgd() -> Claim:
    """Norm of the residual stream at BOS over that elsewhere, inside models of three layers that have both learned to copy."""
    return Claim(
        statement="Trained by SGD instead of Adam, a model that has learned the task has no peak of the residual stream at the "
        "first token.",
        source="guo2024",
        reference="Guo et al. 2024 (arXiv 2410.13835); Kaul et al. 2024 (arXiv 2410.17174)",
        published="From Adam to SGD residual peaks vanish (Guo). Kurtosis of the residual stream: Adam 140, RMSProp 70.5, SGD "
        "with momentum 5.0 (Kaul).",
        presupposes=(
            learns(ADAM),
            learns(SGD),
            Part("there is a peak with adamw", Value("residual_peak_inside", ADAM), more_than=MASSIVE),
        ),
        parts=(Part("there is no peak with sgd", Value("residual_peak_inside", SGD), less_than=MASSIVE),),
        measure=adam_and_sgd,
        costs={"tiny": "minutes", "small": "hours", "60m": "gpu"},
    )
