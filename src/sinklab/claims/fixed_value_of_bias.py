"""Fixed value of bias: the longer the value that a key bias carries, the more of the sink returns to the first token."""

from __future__ import annotations

from sinklab.claims._architecture import KEY_BIAS, LONG_VALUE, SHORT_VALUE, SINK, UNCHANGED, has_sink
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Difference

__all__ = ["fixed_value_of_bias"]


@claims.register("fixed_value_of_bias")
def fixed_value_of_bias() -> Claim:
    """Lengths 0, 5 and 20 along the first coordinate (v' of the paper), fixed; the key alone is learned."""
    zero, short, long = KEY_BIAS.label, SHORT_VALUE.label, LONG_VALUE.label
    return Claim(
        statement="A key bias takes the less of the sink the longer its fixed value is, and the first token gets it back.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 5",
        published="Rates of the bias and of the first token: length 0 73.34 and 0.00, 5 44.43 and 3.71, 20 1.51 and 25.88.",
        variants=(UNCHANGED, KEY_BIAS, SHORT_VALUE, LONG_VALUE),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(), has_sink(zero, "sink_rate_star")),
        parts=(
            Part("a value takes from the bias", Difference("sink_rate_star", short, zero), less_than=-SINK),
            Part("a longer one takes more", Difference("sink_rate_star", long, short), less_than=-SINK),
            Part("the first token gets it back", Difference("sink_rate", long, zero), more_than=SINK),
        ),
    )
