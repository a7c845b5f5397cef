"""Guo et al. 2024 and Kaul et al. 2024: the outliers are Adam's; trained by SGD, the first token has none."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_massive, has_no_massive
from sinklab.claims._sgd import SGD
from sinklab.jobs.claim import BASELINE, Claim, Difference, Part
from sinklab.registry import claims

__all__ = ["adam_against_sgd"]


@claims.register("adam_against_sgd")
def adam_against_sgd() -> Claim:
    """Norm of the first token's hidden state over that of others, at a rate at which SGD learns as well as it can."""
    return Claim(
        statement="Trained by SGD instead of Adam, a model that learns as well has no peak of the residual stream at the first "
        "token.",
        source="guo2024",
        reference="Guo et al. 2024 (arXiv 2410.13835); Kaul et al. 2024 (arXiv 2410.17174)",
        published="From Adam to SGD residual peaks vanish (Guo). Kurtosis of the residual stream: Adam 140, RMSProp 70.5, SGD "
        "with momentum 5.0 (Kaul).",
        presupposes=(
            has_massive(),
            Part("SGD learns as well", Difference("held_out_loss", SGD.label, BASELINE), less_than=0.1),
        ),
        parts=(has_no_massive(SGD.label),),
        variants=(UNCHANGED, SGD),
        read_outs=("norms",),
    )
