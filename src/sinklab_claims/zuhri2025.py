"""Zuhri et al. 2025: sink rates of operations that give a head somewhere else to put its weight, in their order."""

from __future__ import annotations

from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Part
from sinklab_claims.contract.effect import Difference, Trend, Value
from sinklab_claims.variants import ELEMENT_WISE, PLUS_ONE, UNCHANGED, Fields, has_sink, of_paper, operation

zuhri = of_paper("zuhri2025", "Zuhri et al. 2025 (arXiv 2504.20966)")


@claims.register("softpick_table")
@zuhri
def softpick_table() -> Fields:
    """Softpick has no sink, softmax has most; gates, sink logits and softmax plus one lie between, in this order.

    Rates at a threshold of 0.3; rectified and scaled variants of the table are no operations of sinklab.
    """
    softpick, sink_logit = operation("softpick", "softpick"), operation("sink logit", "sink_logit")
    order = (softpick.label, ELEMENT_WISE.label, sink_logit.label, PLUS_ONE.label, BASELINE)  # from the least sink to the most
    less = Difference("sink_rate", BASELINE, PLUS_ONE.label)
    return dict(
        where="Table 3",
        published="Sink rate: softpick 0.00 %, gated 2.00, sink logit 8.78, softmax plus one 16.36, softmax 34.89.",
        presupposes=(has_sink(),),
        parts=(
            Part("softpick has no sink", Value("sink_rate", softpick.label), less_than=1.0),
            Part("softmax plus one has less than softmax", less, more_than=5),
            Part("the order is that of the table", Trend("sink_rate", order), more_than=0.5),
        ),
        variants=(UNCHANGED, softpick, ELEMENT_WISE, sink_logit, PLUS_ONE),
        read_outs=("sinks",),
    )
