"""Shared biases: one key for all heads of a layer still takes the sink; a shared key and value leaves some of it behind."""

from __future__ import annotations

from sinklab.claims._architecture import KEY_VALUE_BIAS, SINK, UNCHANGED, has_no_sink, has_sink, operation
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Difference

__all__ = ["shared_biases"]

SHARED_KEY = operation("key bias, shared", "key_bias", shared=True)
SHARED_BOTH = operation("key-value bias, shared", "key_value_bias", shared=True)


@claims.register("shared_biases")
def shared_biases() -> Claim:
    """Shared across the heads of a layer, against one for each head."""
    return Claim(
        statement="A key bias that heads share takes the sink whole; a shared key-value bias leaves some on the first token.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Rates of the bias and of the first token: key bias shared 68.31 and 0.23, of each head 73.34 and 0.00; "
        "key-value bias shared 56.61 and 12.44, of each head 72.76 and 0.04.",
        variants=(UNCHANGED, KEY_VALUE_BIAS, SHARED_KEY, SHARED_BOTH),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(), has_sink(KEY_VALUE_BIAS.label, "sink_rate_star")),
        parts=(
            has_sink(SHARED_KEY.label, "sink_rate_star"),
            has_no_sink(SHARED_KEY.label),
            has_sink(SHARED_BOTH.label, "sink_rate_star"),
            Part(
                "the first token keeps more when key and value are shared",
                Difference("sink_rate", SHARED_BOTH.label, KEY_VALUE_BIAS.label),
                more_than=SINK,
            ),
        ),
    )
