"""Xiao et al. 2023, Table 3: one first token is too few for a plain model, and enough for one trained with a sink token."""

from __future__ import annotations

from sinklab.claims._first_tokens import LEFT, LOSS, first_tokens
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.contract.trained import Checkpoint

__all__ = ["begins_alike", "one_sink_is_too_few"]

PLAIN, SINK = "no BOS", "sink token, no BOS"


TOO_FEW = Part("one first token is too few", Value("left_by_one", PLAIN), more_than=LEFT)


def begins_alike(checkpoint: Checkpoint) -> str:
    """Why a model is not the plain one of the claim."""
    return "" if checkpoint.bos is None else "every text that it reads begins with one token, which can be the sink alone"


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
            Part(
                "the plain model fails without first tokens",
                Difference("window_0", PLAIN, PLAIN, other="window_4"),
                LOSS,
            ),
        ),
        parts=(
            TOO_FEW,
            Part("one sink token is enough", Value("left_by_one", SINK), less_than=LEFT),
        ),
        variants=(
            Variant(PLAIN, {"data.bos": "none"}),
            Variant(SINK, {"data.bos": "none", "model.operation": {"name": "sink_token"}}),
        ),
        read_outs=(first_tokens,),
        bases=("no-bos",),
        checkpoint=OnCheckpoint(
            label=PLAIN,
            parts=(TOO_FEW,),
            reads="context",
            not_about=begins_alike,
            remark="A checkpoint answers for the model without a sink token.",
        ),
    )
