"""Learnable coordinates: a key bias of which one coordinate is learned takes the sink already, if less than a whole one."""

from __future__ import annotations

from sinklab.claims._architecture import KEY_BIAS, SINK, UNCHANGED, has_sink, operation
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Difference

__all__ = ["learnable_coordinates"]

FEW = (
    operation("key bias, 1 coordinate", "key_bias", learnable=1),
    operation("key bias, 8 coordinates", "key_bias", learnable=8),
)


@claims.register("learnable_coordinates")
def learnable_coordinates() -> Claim:
    """One and eight coordinates against the whole key; the others are zero and stay it."""
    return Claim(
        statement="A key bias with few learned coordinates takes the sink from the first token, and a whole one takes more.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Rates of the bias and of the first token: 1 coordinate 32.18 and 4.74, 8 31.39 and 4.54, 64 69.19 and 0.04; "
        "all 73.34 and 0.00; no bias 18.18 on the first token.",
        variants=(UNCHANGED, KEY_BIAS, *FEW),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(), has_sink(KEY_BIAS.label, "sink_rate_star")),
        parts=(
            *(has_sink(variant.label, "sink_rate_star") for variant in FEW),
            *(
                Part(
                    f"the first token has less with {variant.label}",
                    Difference("sink_rate", variant.label, UNCHANGED.label),
                    less_than=-SINK,
                )
                for variant in FEW
            ),
            Part(
                "the whole key takes more than one coordinate",
                Difference("sink_rate_star", KEY_BIAS.label, FEW[0].label),
                more_than=SINK,
            ),
        ),
    )
