"""What claims about eviction in trained models share: losses of a window with none, one, two and four first tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.results.metric import Metric
from sinklab.training.windowed import limited_attention, token_losses
from sinklab_claims.contract.trained import MeasuredModel

__all__ = ["LEFT", "LOSS", "METRICS", "SAME", "first_tokens"]

LOSS = 0.05
"""Nats per token: a difference below it is no failure. Published failures are of 0.4 to 7.4 nats."""

SAME = 0.02
"""Nats per token: a difference below it is none. Published is 0.024 for a plain model with one first token instead of four."""

LEFT = 0.05
"""Share of the failure that is left with one first token beside the window, from which one is too few. Published are 0.055 for
the plain model (perplexities of 27.87, 18.49 and 18.05) and 0.000 for the one with a learned token in front."""

KEPT = (0, 1, 2, 4)
TOKENS, LEAST_ROWS = 8_192, 8
WINDOWS = 2_048
"""Tokens at which the windows are encoded anew, about."""

METRICS = (
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
        f"less window_4 over window_0 less window_4; absent where that is no more than {LOSS} nats.",
    ),
)


@torch.no_grad()
def first_tokens(trained: MeasuredModel) -> dict[str, float]:
    """Held-out losses under windows of a quarter of the context.

    All are over the same tokens, as many as re-computation is taken at, and give :data:`METRICS`.
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
    return numbers | ({"left_by_one": (numbers["window_1"] - numbers["window_4"]) / lost} if lost > LOSS else {})
