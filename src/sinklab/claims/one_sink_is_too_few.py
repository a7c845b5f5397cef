"""Xiao et al. 2023, Table 3: one first token is too few for a plain model, and enough for one trained with a sink token."""

from __future__ import annotations

from sinklab.registry import claims
from sinklab.reproduction.claim import Claim, Condition
from sinklab.reproduction.effects import Difference, Value
from sinklab.reproduction.verdict import Part

__all__ = ["one_sink_is_too_few"]

LEAST = 0.02
"""Nats. Published: with one first token the plain model is 0.024 nats from its best, the one with a sink token 0.001."""


@claims.register("one_sink_is_too_few")
def one_sink_is_too_few() -> Claim:
    """The paper's reason: samples that begin anyhow have no token that could be the sink alone. Hence without BOS."""
    return Claim(
        statement="A model whose training samples begin with no fixed token spreads its sink over several first tokens, so "
        "that one of them beside a window is too few; with a learned token in front of every sample one is enough.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), section 3.3 and Table 3",
        published="Perplexity with one and with four first tokens: plain model 18.49 and 18.05, learnable sink 18.01 and "
        "18.02.",
        presupposes=(
            Part("the plain model fails without first tokens", Value("window_gap", "no BOS"), "nats", more_than=LEAST),
        ),
        parts=(
            Part("one first token is too few", Value("window_sink_gap", "no BOS"), "nats", more_than=LEAST),
            Part(
                "with a sink token less is missing",
                Difference("window_sink_gap", "no BOS", "sink token, no BOS"),
                "nats",
                more_than=LEAST,
            ),
        ),
        conditions=(
            Condition("no BOS", {"data.bos": "none"}),
            Condition("sink token, no BOS", {"data.bos": "none", "model.operation": {"name": "sink_token"}}),
        ),
        read_outs=("sinks", "window"),
    )
