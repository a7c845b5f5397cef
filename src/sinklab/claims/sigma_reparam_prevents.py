"""Zhai et al. 2023: sigma-reparam keeps the entropy up, and training in order, where softmax alone collapses."""

from __future__ import annotations

from sinklab.claims._rates import BASE, HARM, TOO_LARGE, TOO_LARGE_SIGMA, course, is_too_large
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Difference

__all__ = ["sigma_reparam_prevents"]


@claims.register("sigma_reparam_prevents")
def sigma_reparam_prevents() -> Claim:
    """At one learning rate that is too large; here the projections of attention only are reparametrised."""
    return Claim(
        statement="Where a large learning rate spoils training with softmax, sigma-reparam keeps the loss down and the entropy "
        "of attention up.",
        source="zhai2023",
        reference="Zhai et al. 2023 (arXiv 2303.06296), section 4",
        published="All linear layers are reparametrised; training is then stable without warm-up, weight decay, layer norm or "
        "an adaptive optimiser. sinklab's operation reparametrises those inside attention.",
        presupposes=(is_too_large(),),
        parts=(
            Part("the loss is lower", Difference("least_loss", TOO_LARGE_SIGMA.label, TOO_LARGE.label), less_than=-HARM),
            Part(
                "the entropy stays up (so does that of attention that learns nothing)",
                Difference("least_entropy", TOO_LARGE_SIGMA.label, TOO_LARGE.label),
                more_than=0.5,
            ),
        ),
        variants=(BASE, TOO_LARGE, TOO_LARGE_SIGMA),
        read_outs=(course,),
    )
