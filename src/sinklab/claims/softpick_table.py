"""Zuhri et al. 2025: sink rates of operations that give a head somewhere else to put its weight, in their order."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_sink, operation
from sinklab.claims._gates import ELEMENT_WISE
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part
from sinklab_claims.contract.effect import Difference, Trend, Value

__all__ = ["softpick_table"]

SOFTPICK = operation("softpick", "softpick")
SINK_LOGIT = operation("sink logit", "sink_logit")
PLUS_ONE = operation("softmax plus one", "softmax_plus_one")

ORDER = (SOFTPICK.label, ELEMENT_WISE.label, SINK_LOGIT.label, PLUS_ONE.label, BASELINE)
"""From the least sink to the most."""


@claims.register("softpick_table")
def softpick_table() -> Claim:
    """Rates at a threshold of 0.3; rectified and scaled variants of the table are no operations of sinklab."""
    return Claim(
        statement="Softpick has no sink, softmax has most; gates, sink logits and softmax plus one lie between, in this order.",
        source="zuhri2025",
        reference="Zuhri et al. 2025 (arXiv 2504.20966), Table 3",
        published="Sink rate: softpick 0.00 %, gated 2.00, sink logit 8.78, softmax plus one 16.36, softmax 34.89.",
        presupposes=(has_sink(),),
        parts=(
            Part("softpick has no sink", Value("sink_rate", SOFTPICK.label), less_than=1.0),
            Part(
                "softmax plus one has less than softmax",
                Difference("sink_rate", BASELINE, PLUS_ONE.label),
                more_than=5,
            ),
            Part("the order is that of the table", Trend("sink_rate", ORDER), more_than=0.5),
        ),
        variants=(UNCHANGED, SOFTPICK, ELEMENT_WISE, SINK_LOGIT, PLUS_ONE),
        read_outs=("sinks",),
    )
