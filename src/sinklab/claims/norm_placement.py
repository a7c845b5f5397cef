"""Norm placement: with norms after the residual sums there is a sink as well."""

from __future__ import annotations

from sinklab.claims._architecture import POST_NORM, UNCHANGED, has_learned, has_sink
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim

__all__ = ["norm_placement"]


@claims.register("norm_placement")
def norm_placement() -> Claim:
    """Post-norm against the pre-norm of the baseline, each at a rate at which it learns.

    Where the large states are is ``massive_before_post_norm``.
    """
    return Claim(
        statement="The sink appears under post-norm as it does under pre-norm.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Sink rate 13.54 under post-norm, 18.18 under pre-norm.",
        variants=(UNCHANGED, POST_NORM),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(), has_learned(POST_NORM.label)),
        parts=(has_sink(POST_NORM.label),),
    )
