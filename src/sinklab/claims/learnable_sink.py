"""Xiao et al. 2023, Table 3: a model trained with a sink token needs that one token beside its window, and costs nothing."""

from __future__ import annotations

from sinklab.claims._first_tokens import LEFT, LOSS, SAME, first_tokens
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Value

__all__ = ["learnable_sink"]

PLAIN, SINK = "no BOS", "sink token, no BOS"


@claims.register("learnable_sink")
def learnable_sink() -> Claim:
    """Without BOS, as the paper's models are trained; with it every model has a token that is always the same in front.

    How much of the failure is left with the token alone is judged as a share of it, which does not depend on how large it is.
    """
    return Claim(
        statement="With a learned token in front of every training sample, that token alone makes a window work; without it "
        "the window fails, and the loss of the whole context is that of the plain model.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 3 and Figure 6",
        published="Perplexity at 160 million parameters with 0, 1, 2 and 4 first tokens beside the window: learnable sink "
        "1235, 18.01, 18.01, 18.02; plain model 27.87, 18.49, 18.05, 18.05. The loss curves overlap.",
        parts=(
            Part(
                "without the sink token a window fails",
                Difference("window_0", SINK, SINK, other="window_4"),
                more_than=LOSS,
            ),
            Part("it alone is enough", Value("left_by_one", SINK), less_than=LEFT),
            Part("the loss is no higher than the plain model's", Difference("held_out_loss", SINK, PLAIN), less_than=SAME),
        ),
        variants=(
            Variant(PLAIN, {"data.bos": "none"}),
            Variant(SINK, {"data.bos": "none", "model.operation": {"name": "sink_token"}}),
        ),
        read_outs=(first_tokens, "sinks"),
        bases=("no-bos",),
    )
