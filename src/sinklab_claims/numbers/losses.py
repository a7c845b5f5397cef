"""Losses of a trained model under its window and with its first tokens, and the course of its training."""

from __future__ import annotations

import math

import pandas as pd
import torch

from sinklab.registry import read_outs
from sinklab.results.metric import PERCENTAGE, Metric
from sinklab.training.rows import token_losses, windowed_losses
from sinklab_claims.contract.trained import MeasuredModel, TrainedModel, gives
from sinklab_claims.numbers.attention import batches

TOKENS, LEAST_ROWS = 16_384, 32
"""Tokens of held-out text behind a mean loss, and rows of it at least."""

SINKS = 4
"""First tokens that are kept beside the window, as in StreamingLLM."""

WINDOW = (
    Metric(
        "window_gap",
        "nats",
        "Mean next-token loss when every query sees the last quarter of the context and nothing else, less the loss of dense "
        "attention; over the tokens predicted from positions behind the first quarter.",
    ),
    Metric(
        "window_sink_gap",
        "nats",
        f"The same when queries also see the first {SINKS} tokens and the learned tokens in front (Xiao et al. 2023, arXiv "
        "2309.17453).",
    ),
    Metric("sink_worth", "nats", "window_gap - window_sink_gap."),
)
"""Metrics. Positions stay those of the text: nothing is moved up, as a cache would."""


@read_outs.register("window")
@gives(*WINDOW)
@torch.no_grad()
def window(trained: MeasuredModel) -> dict[str, float]:
    """What queries lose that see a window only, and how much of that the first tokens give back.

    Numbers of :data:`WINDOW` on held-out rows of the length of the training.
    """
    model, context = trained.loaded.model, trained.context
    size, visible = max(1, context // 4), range(trained.front + SINKS)
    dense, with_sinks, alone = [], [], []
    for part in batches(trained.rows(max(LEAST_ROWS, TOKENS // context))):
        dense.append(token_losses(model, part, after=size))
        losses = windowed_losses(model, part, size, visible)
        with_sinks.append(losses[0])
        alone.append(losses[1])
    losses_of = [torch.cat(parts).double().mean().item() for parts in (dense, with_sinks, alone)]
    numbers = {"window_gap": losses_of[2] - losses_of[0], "window_sink_gap": losses_of[1] - losses_of[0]}
    return numbers | {"sink_worth": numbers["window_gap"] - numbers["window_sink_gap"]}


_AT = {
    "start": "before the first step",
    "warm": "at the first measurement from the end of warm-up on",
    "end": "at the last measurement",
}

TRAINING = tuple(
    Metric(
        f"sink_rate_{when}",
        "percent",
        f"Sink rate (gu2024) of the first token on the probe rows of the training, {words}.",
        range=PERCENTAGE,
    )
    for when, words in _AT.items()
)


@read_outs.register("training")
@gives(*TRAINING, of_diverged=True)
def training(trained: TrainedModel) -> dict[str, float]:
    """How sinks came to be, read from the table that the training has left, also of runs that broke.

    Numbers of :data:`TRAINING`; what a run that ended early has not reached is absent.
    """
    config = trained.config
    rate = curve_of(trained.table, "gu2024", config.model.tokens_in_front)
    numbers = {"sink_rate_start": rate[0]} if 0 in rate else {}
    if reached := [value for step, value in rate.items() if step >= config.schedule.warmup_steps]:
        numbers["sink_rate_warm"] = reached[0]
    return numbers | ({"sink_rate_end": list(rate.values())[-1]} if rate else {})


def curve_of(table: pd.DataFrame, metric: str, place: int | None = None) -> dict[int, float]:
    """Step to value of a number of the whole model, in order; a null value, which is no number, is NaN.

    Args:
        table: of one training run, with ``step``.
        place: position of the key that the number is of, where it is of one.
    """
    rows = table[table["layer"].isna() & table["step"].notna() & (table["metric"] == metric)]
    rows = (rows if place is None else rows[rows["key_position"] == place]).sort_values("step", kind="stable")
    values = rows["value"].astype("Float64").to_numpy(dtype="float64", na_value=math.nan)
    return {int(step): float(value) for step, value in zip(rows["step"], values, strict=True)}
