"""Training: how sinks came to be, and how smoothly, read from the table that the training has left."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from sinklab.registry import read_outs
from sinklab.results.metric import FRACTION, PERCENTAGE, Metric
from sinklab_claims.contract.trained import TrainedModel, gives

__all__ = ["numbers_of_table", "training"]

SPIKE = 0.5
"""Nats above the best loss so far from which a record is a spike."""

SHARES = {"quarter": 0.25, "half": 0.5}

_RATE = "Sink rate (gu2024) of the first token on the probe rows of the training"
_WEIGHT = "Mean weight (qiu2025_first_attention) on the first token on the probe rows"
_AT = {
    "start": "before the first step",
    "warm": "at the first measurement from the end of warm-up on",
    "quarter": "at the first measurement after a quarter of the steps",
    "half": "at the first measurement after half of the steps",
    "end": "at the last measurement",
}

TRAINING = (
    *(Metric(f"sink_rate_{when}", "percent", f"{_RATE}, {words}.", range=PERCENTAGE) for when, words in _AT.items()),
    *(
        Metric(
            f"first_attention_{when}",
            "fraction",
            f"{_WEIGHT}, {words}; absent where learned tokens stand in front.",
            range=FRACTION,
        )
        for when, words in _AT.items()
        if when != "start"
    ),
    Metric(
        "onset_share",
        "fraction",
        "Share of the steps after which the sink rate first reaches half of sink_rate_end; absent where that is 0.",
        range=FRACTION,
    ),
    Metric(
        "entropy_least",
        "nats",
        "Least mean entropy of the attention rows over the measurements of the training.",
        over_seeds="min",
    ),
    Metric(
        "loss_spikes",
        "count",
        f"Records of the training loss after warm-up that lie more than {SPIKE} nats above the least before them, or are not "
        "finite; a record is the mean since the one before.",
    ),
    Metric("grad_norm_largest", "norm", "Largest gradient norm on record, before clipping.", over_seeds="max"),
)


@read_outs.register("training")
@gives(*TRAINING, of_diverged=True)
def training(trained: TrainedModel) -> dict[str, float]:
    """How sinks came to be, and how smoothly, read from the table that the training has left, also of runs that broke.

    Numbers of :data:`TRAINING`; what a run that ended early has not reached is absent.
    """
    config = trained.config
    return numbers_of_table(
        trained.table,
        steps=config.training.steps,
        warmup_steps=config.schedule.warmup_steps,
        front=config.model.tokens_in_front,
    )


def numbers_of_table(table: pd.DataFrame, *, steps: int, warmup_steps: int, front: int = 0) -> dict[str, float]:
    """The same of a long table.

    Args:
        table: of one training run, with ``step``.
        steps: those that were asked for.
        front: learned tokens in front of every row, which the table counts like others.
    """
    whole = table[table["layer"].isna() & table["step"].notna()].sort_values("step", kind="stable")
    rate = _curve(whole[whole["key_position"] == front], "gu2024")
    curves = {"sink_rate": rate}
    if not front:
        curves["first_attention"] = _curve(whole, "qiu2025_first_attention")
    numbers: dict[str, float] = {}
    if 0 in rate:
        numbers["sink_rate_start"] = rate[0]
    least_steps = {"warm": warmup_steps, **{when: share * steps for when, share in SHARES.items()}}
    for metric, curve in curves.items():
        numbers |= {f"{metric}_{when}": value for when, value in _stages(curve, least_steps).items()}
    end = numbers.get("sink_rate_end", 0.0)
    if end > 0:
        numbers["onset_share"] = next(step for step, value in rate.items() if value >= end / 2) / steps
    entropies = [value for value in _curve(whole, "entropy").values() if math.isfinite(value)]
    if entropies:
        numbers["entropy_least"] = min(entropies)
    losses = _curve(whole, "train_loss")
    if losses:
        numbers["loss_spikes"] = float(_spikes(losses, warmup_steps))
    norms = [value for value in _curve(whole, "gradient_norm").values() if math.isfinite(value)]
    if norms:
        numbers["grad_norm_largest"] = max(norms)
    return numbers


def _curve(whole: pd.DataFrame, metric: str) -> dict[int, float]:
    """Step to value, in order; a null value, which the table holds for what is no number, is NaN."""
    rows = whole[whole["metric"] == metric]
    values = rows["value"].astype("Float64").to_numpy(dtype="float64", na_value=math.nan)
    return {int(step): float(value) for step, value in zip(rows["step"], values, strict=True)}


def _stages(curve: Mapping[int, float], least_steps: Mapping[str, float]) -> dict[str, float]:
    """The first value from each of some steps on, by the name of the stage, and the last one as ``end``."""
    stages: dict[str, float] = {}
    for when, least in least_steps.items():
        reached = [value for step, value in curve.items() if step >= least]
        if reached:
            stages[when] = reached[0]
    if curve:
        stages["end"] = list(curve.values())[-1]
    return stages


def _spikes(losses: Mapping[int, float], warmup_steps: int) -> int:
    least, spikes = math.inf, 0
    for step, loss in losses.items():
        if step > warmup_steps and (not math.isfinite(loss) or loss > least + SPIKE):
            spikes += 1
        if math.isfinite(loss):
            least = min(least, loss)
    return spikes
