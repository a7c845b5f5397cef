"""Xiao et al. 2023: within the trained context a window without the first tokens fails, and sinks restore it."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.training.rows import limited_attention, token_losses
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.contract.trained import Checkpoint, MeasuredModel, gives
from sinklab_claims.variants import UNCHANGED, Fields, of_paper

__all__ = ["MARGIN", "first_tokens", "window_fails", "xiao"]

xiao = of_paper("xiao2023", "Xiao et al. 2023 (arXiv 2309.17453)")

MARGIN = 0.05
"""Nats per token: a difference below it is none. Published failures are of 0.4 to 7 nats, agreements of 0 to 0.05."""

SAME = 0.02
"""Nats per token: a difference below it is none. Published is 0.024 for a plain model with one first token instead of four."""

LEFT = 0.05
"""Share of the failure that is left with one first token beside the window, from which one is too few. Published are 0.055 for
the plain model (perplexities of 27.87, 18.49 and 18.05) and 0.000 for the one with a learned token in front."""

HAS_SINK = 0.1
"""Mean weight on the first token from which a model has a sink. Even weights give it 0.07 over rows of 64 tokens."""

KEPT = (0, 1, 2, 4)
TOKENS, LEAST_ROWS = 8_192, 8
WINDOWS = 2_048
"""Tokens at which the windows are encoded anew, about."""

FIRST_TOKENS = (
    *(
        Metric(
            f"window_{number}",
            "nats",
            f"Held-out loss when every query sees {number} first tokens (learned ones in front counted) and the most recent "
            "ones (itself among them), a quarter of the context together; positions stay those of the text.",
        )
        for number in KEPT
    ),
    Metric(
        "re_computation",
        "nats",
        "Held-out loss when that quarter is encoded anew for every token, with BOS in the place of its oldest token where "
        "training puts one in front of every row, and learned tokens in front.",
    ),
    Metric(
        "left_by_one",
        "fraction",
        "Share of what a window without first tokens loses against one with four that is still lost with one of them: window_1 "
        f"less window_4 over window_0 less window_4; absent where that is no more than {MARGIN} nats.",
    ),
)


@gives(*FIRST_TOKENS)
@torch.no_grad()
def first_tokens(trained: MeasuredModel) -> dict[str, float]:
    """Held-out losses under windows of a quarter of the context.

    All are over the same tokens, as many as re-computation is taken at, and give :data:`FIRST_TOKENS`.
    """
    context, model = trained.context, trained.loaded.model
    size = max(KEPT[-1] + 1, context // 4)
    rows = trained.rows(max(LEAST_ROWS, TOKENS // context), context)
    targets = context - size - 1
    every = max(1, len(rows) * targets // WINDOWS)
    losses_of: dict[str, list[Tensor]] = {}
    for part in rows.split(max(1, TOKENS // context)):
        for number in KEPT:
            with limited_attention(model, size - number, range(number)):
                losses_of.setdefault(f"window_{number}", []).append(token_losses(model, part, after=size)[:, ::every].flatten())
        # The window of the token at position t holds t - size … t - 1; the first of these tokens is size + 1.
        windows = part.unfold(1, size + 1, 1)[:, 1::every].flatten(0, 1).clone()
        if trained.every_row_has_bos:
            windows[:, 0] = part[0, 0]
        losses = [token_losses(model, some, after=size - 1).flatten() for some in windows.split(max(1, TOKENS // size))]
        losses_of.setdefault("re_computation", []).extend(losses)
    numbers = {name: float(torch.cat(parts).double().mean()) for name, parts in losses_of.items()}
    lost = numbers["window_0"] - numbers["window_4"]
    return numbers | ({"left_by_one": (numbers["window_1"] - numbers["window_4"]) / lost} if lost > MARGIN else {})


def window_fails(label: str, says: str) -> Part:
    """A window without first tokens loses against one with four."""
    return Part(says, Difference("window_0", label, label, "window_4"), more_than=MARGIN)


@claims.register("window_fails_sinks_restore")
@xiao
def window_fails_sinks_restore() -> Fields:
    """A softmax model that sees only a window of recent tokens loses far more than the context it is denied is worth: with four
    first tokens in the window's budget the loss is that of re-computing the window.

    Within the trained context, so that nothing fails but the eviction; seeds are trainings.
    """
    restored = Difference("window_4", BASELINE, BASELINE, "re_computation")
    return dict(
        where="Table 1 and Figure 1",
        published="Perplexity of Llama-2-13B: window of 1,024 tokens 5158, four first tokens and 1,020 recent ones 5.40, "
        "re-computation 5.43.",
        presupposes=(Part("the model has a sink", Value("first_attention", BASELINE), more_than=HAS_SINK),),
        parts=(
            window_fails(BASELINE, "without the first tokens the loss rises"),
            Part("with four it is that of re-computation", restored, less_than=MARGIN),
        ),
        variants=(UNCHANGED,),
        checkpoint=OnCheckpoint(reads="context"),
        read_outs=("sinks", first_tokens),
    )


PLAIN = Variant("no BOS", {"data.bos": "none"})
TOKEN = Variant("sink token, no BOS", {"data.bos": "none", "model.operation": {"name": "sink_token"}})


@claims.register("learnable_sink")
@xiao
def learnable_sink() -> Fields:
    """With a learned token in front of every training sample, that token alone makes a window work; without it the window
    fails, and the loss of the whole context is that of the plain model.

    Without BOS, as the paper's models are trained; with it every model has a token that is always the same in front. How much
    of the failure is left with the token alone is judged as a share of it, which does not depend on how large it is.
    """
    costs = Difference("held_out_loss", TOKEN.label, PLAIN.label)
    return dict(
        where="Table 3 and Figure 6",
        published="Perplexity at 160 million parameters with 0, 1, 2 and 4 first tokens beside the window: learnable sink "
        "1235, 18.01, 18.01, 18.02; plain model 27.87, 18.49, 18.05, 18.05. The loss curves overlap.",
        parts=(
            window_fails(TOKEN.label, "without the sink token a window fails"),
            Part("it alone is enough", Value("left_by_one", TOKEN.label), less_than=LEFT),
            Part("the loss is no higher than the plain model's", costs, less_than=SAME),
        ),
        variants=(PLAIN, TOKEN),
        read_outs=(first_tokens, "sinks"),
        bases=("no-bos",),
    )


def _begins_alike(checkpoint: Checkpoint) -> str:
    """Why a model is not the plain one of the claim."""
    return "" if checkpoint.bos is None else "every text that it reads begins with one token, which can be the sink alone"


@claims.register("one_sink_is_too_few")
@xiao
def one_sink_is_too_few() -> Fields:
    """A model whose training samples begin with no fixed token spreads its sink over several first tokens, so that one of them
    beside a window is too few; with a learned token in front of every sample one is enough.

    The paper's reason: samples that begin anyhow have no token that could be the sink alone. Hence without BOS.
    """
    too_few = Part("one first token is too few", Value("left_by_one", PLAIN.label), more_than=LEFT)
    return dict(
        where="section 3.3 and Table 3",
        published="Perplexity with one and with four first tokens: plain model 18.49 and 18.05, learnable sink 18.01 and "
        "18.02.",
        presupposes=(window_fails(PLAIN.label, "the plain model fails without first tokens"),),
        parts=(too_few, Part("one sink token is enough", Value("left_by_one", TOKEN.label), less_than=LEFT)),
        variants=(PLAIN, TOKEN),
        read_outs=(first_tokens,),
        bases=("no-bos",),
        checkpoint=OnCheckpoint(
            label=PLAIN.label,
            parts=(too_few,),
            reads="context",
            not_about=_begins_alike,
            remark="A checkpoint answers for the model without a sink token.",
        ),
    )
