"""Training: how sinks came to be, read from the table that the training has left."""

from __future__ import annotations

import math

import pandas as pd

from sinklab.registry import read_outs
from sinklab.results.metric import PERCENTAGE, Metric
from sinklab_claims.contract.trained import TrainedModel, gives

__all__ = ["curve_of", "training"]

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
