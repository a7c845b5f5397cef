"""Massive activations need a sink: where the surplus attention has another place, the first token is as large as others."""

from __future__ import annotations

from sinklab.claims._architecture import (
    KEY_BIAS,
    KEY_VALUE_BIAS,
    LONG_VALUE,
    SIGMOID,
    UNCHANGED,
    VALUE_BIAS,
    has_massive,
    has_no_massive,
)
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim

__all__ = ["massive_activations_need_a_sink"]


@claims.register("massive_activations_need_a_sink")
def massive_activations_need_a_sink() -> Claim:
    """Biases that take the sink and sigmoid attention, against a value bias and a key bias that has to carry a long value."""
    return Claim(
        statement="Key biases, key-value biases and sigmoid attention leave no massive activations; a value bias or a key bias "
        "with a long fixed value, does.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="At a billion parameters |h_1| over the mean of others peaks at 23 with softmax and stays at 1.0 to 1.5 with "
        "sigmoid; absent with key and key-value biases, present with value biases; back as the fixed value grows.",
        variants=(UNCHANGED, KEY_BIAS, KEY_VALUE_BIAS, SIGMOID, VALUE_BIAS, LONG_VALUE),
        bases=("no-bos", "bos"),
        read_outs=("norms",),
        presupposes=(has_massive(),),
        parts=(
            has_no_massive(KEY_BIAS.label),
            has_no_massive(KEY_VALUE_BIAS.label),
            has_no_massive(SIGMOID.label),
            has_massive(VALUE_BIAS.label),
            has_massive(LONG_VALUE.label),
        ),
    )
