"""Xiao et al. 2023, Table 1: a window without the first tokens ruins a softmax model, and sinks restore it."""

from __future__ import annotations

from sinklab.registry import claims
from sinklab.reproduction.claim import BASELINE, Claim, Condition
from sinklab.reproduction.effects import Value
from sinklab.reproduction.verdict import Part

__all__ = ["window_fails_sinks_restore"]

LOSS = 0.05
"""Nats per token: a difference below it is none. Published are 6.9 nats without first tokens and 0.006 with them."""

SINK = 0.1
"""Mean weight on the first token from which a model has a sink. Even weights give it 0.07 over rows of 64 tokens."""


@claims.register("window_fails_sinks_restore")
def window_fails_sinks_restore() -> Claim:
    """Within the trained context, so that nothing fails but the eviction; seeds are trainings."""
    return Claim(
        statement="A softmax model that sees a window of recent tokens and not the first ones loses far more than the "
        "context it is denied is worth: with the sinks shown besides the window, almost all of it is back.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 1 and Figure 1",
        published="Perplexity of Llama-2-13B: window of 1,024 tokens 5158, four first tokens and 1,020 recent ones 5.40, "
        "re-computation, which loses nothing, 5.43.",
        presupposes=(Part("the model has a sink", Value("first_attention", BASELINE), "fraction", more_than=SINK),),
        parts=(
            Part("without the first tokens the loss rises", Value("window_gap", BASELINE), "nats", more_than=LOSS),
            Part("with the sinks it is that of dense attention", Value("window_sink_gap", BASELINE), "nats", less_than=LOSS),
        ),
        conditions=(Condition(BASELINE),),
        read_outs=("sinks", "window"),
    )
