"""Xiao et al. 2023, Table 3: softmax plus one, the zero sink, still needs first tokens beside its window."""

from __future__ import annotations

from sinklab.claims._first_tokens import LOSS, SAME, first_tokens
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Difference
from sinklab_claims.contract.trained import Checkpoint

__all__ = ["other_operation", "zero_sink"]

PLAIN, ZERO = "no BOS", "zero sink, no BOS"


LEANS = (
    Part("without first tokens a window fails", Difference("window_0", ZERO, ZERO, other="window_4"), more_than=LOSS),
    Part("one of them repairs most of it", Difference("window_0", ZERO, ZERO, other="window_1"), more_than=LOSS),
)
"""What one model can answer."""


def other_operation(checkpoint: Checkpoint) -> str:
    """Why a model has no zero sink."""
    operation = checkpoint.loaded.operation
    return "" if operation == "softmax_plus_one" else f"its attention is {operation}, and the claim is about softmax plus one"


@claims.register("zero_sink")
def zero_sink() -> Claim:
    """A key and a value of zero are no sink that a window could rest on alone."""
    return Claim(
        statement="Trained with softmax plus one, a model still leans on its first tokens: a window without them fails, one "
        "more of them repairs most of it, and the loss of the whole context is that of the plain model.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 3",
        published="Perplexity at 160 million parameters with 0, 1, 2 and 4 first tokens beside the window: zero sink 29214, "
        "19.90, 18.27, 18.01; plain model 27.87, 18.49, 18.05, 18.05.",
        presupposes=(
            Part("the plain model fails without first tokens", Difference("window_0", PLAIN, PLAIN, other="window_4"), LOSS),
        ),
        parts=(
            *LEANS,
            Part(
                "the loss is the plain model's",
                Difference("held_out_loss", ZERO, PLAIN),
                more_than=-SAME,
                less_than=SAME,
            ),
        ),
        variants=(
            Variant(PLAIN, {"data.bos": "none"}),
            Variant(ZERO, {"data.bos": "none", "model.operation": {"name": "softmax_plus_one"}}),
        ),
        read_outs=(first_tokens, "sinks"),
        bases=("no-bos",),
        checkpoint=OnCheckpoint(label=ZERO, parts=LEANS, presupposes=(), reads="context", not_about=other_operation),
    )
