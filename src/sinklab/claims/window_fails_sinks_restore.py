"""Xiao et al. 2023, Table 1: a window without the first tokens ruins a softmax model, and sinks restore it."""

from __future__ import annotations

from sinklab.claims._first_tokens import LOSS, first_tokens
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Difference, Value

__all__ = ["window_fails_sinks_restore"]

SINK = 0.1
"""Mean weight on the first token from which a model has a sink. Even weights give it 0.07 over rows of 64 tokens."""


@claims.register("window_fails_sinks_restore")
def window_fails_sinks_restore() -> Claim:
    """Within the trained context, so that nothing fails but the eviction; seeds are trainings."""
    return Claim(
        statement="A softmax model that sees only a window of recent tokens loses far more than the context it is denied is "
        "worth: with four first tokens in the window's budget the loss is that of re-computing the window.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 1 and Figure 1",
        published="Perplexity of Llama-2-13B: window of 1,024 tokens 5158, four first tokens and 1,020 recent ones 5.40, "
        "re-computation 5.43.",
        presupposes=(Part("the model has a sink", Value("first_attention", BASELINE), more_than=SINK),),
        parts=(
            Part(
                "without the first tokens the loss rises",
                Difference("window_0", BASELINE, BASELINE, other="window_4"),
                more_than=LOSS,
            ),
            Part(
                "with four it is that of re-computation",
                Difference("window_4", BASELINE, BASELINE, other="re_computation"),
                less_than=LOSS,
            ),
        ),
        variants=(Variant(BASELINE),),
        checkpoint=OnCheckpoint(reads="context"),
        read_outs=("sinks", first_tokens),
    )
