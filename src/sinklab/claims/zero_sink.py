"""Xiao et al. 2023, Table 3: softmax plus one, the zero sink, still needs first tokens beside its window."""

from __future__ import annotations

from sinklab.registry import claims
from sinklab.reproduction.claim import Claim, Condition
from sinklab.reproduction.effects import Difference, Value
from sinklab.reproduction.verdict import Part

__all__ = ["zero_sink"]

LOSS = 0.05
"""Nats per token: a difference below it is none. Published are 7.4 nats without first tokens and 0.10 with one."""

SAME = 0.02
"""Nats of held-out loss either way; with four first tokens the published perplexities are 18.01 and 18.05."""


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
        parts=(
            Part("without first tokens a window fails", Value("window_gap", "zero sink, no BOS"), "nats", more_than=LOSS),
            Part("one first token repairs it", Value("sink_worth", "zero sink, no BOS"), "nats", more_than=LOSS),
            Part(
                "the loss is the plain model's",
                Difference("held_out_loss", "zero sink, no BOS", "no BOS"),
                "nats",
                more_than=-SAME,
                less_than=SAME,
            ),
        ),
        conditions=(
            Condition("no BOS", {"data.bos": "none"}),
            Condition("zero sink, no BOS", {"data.bos": "none", "model.operation": {"name": "softmax_plus_one"}}),
        ),
        read_outs=("sinks", "window"),
    )
