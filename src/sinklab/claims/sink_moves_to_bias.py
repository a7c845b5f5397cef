"""Sink moves to bias: given a token, a key and value, or a key of its own, the sink leaves the first token for it."""

from __future__ import annotations

from sinklab.claims._architecture import (
    KEY_BIAS,
    KEY_VALUE_BIAS,
    SINK_TOKEN,
    UNCHANGED,
    VALUE_BIAS,
    has_no_sink,
    has_sink,
)
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim

__all__ = ["sink_moves_to_bias"]

TAKING = (SINK_TOKEN, KEY_VALUE_BIAS, KEY_BIAS)


@claims.register("sink_moves_to_bias")
def sink_moves_to_bias() -> Claim:
    """Three places that can take surplus attention, and a value added to the output, which cannot.

    ``sink_rate`` is about the first token of the text, also where a learned token stands in front of it. The paper's models
    read no BOS; at the scales that have BOS in front of every row it is that first token, and a place of the same kind.
    """
    return Claim(
        statement="A sink token, a key-value bias or a key bias takes the sink from the first token; a value bias does not.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 4",
        published="Rates of the bias and of the first token: sink token 74.12 and 0.00, key-value bias 72.76 and 0.04, "
        "key bias 73.34 and 0.00; first token with a value bias 17.53, without any 18.18.",
        variants=(UNCHANGED, *TAKING, VALUE_BIAS),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=(
            *(has_sink(variant.label, "sink_rate_star") for variant in TAKING),
            *(has_no_sink(variant.label) for variant in TAKING),
            has_sink(VALUE_BIAS.label),
        ),
    )
