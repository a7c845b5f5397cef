"""The columns of the comparison: what each number is, which training it is read from, and which direction is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from sinklab.results.metric import FRACTION, PERCENTAGE, Metric, declared

__all__ = ["COLUMNS", "DECIDING", "GROUPS", "ON_NATURAL_TEXT", "READ_OUTS", "TABLES", "Column", "Source"]

Source = Literal["chosen", "rates", "scale", "longer", "trigger"]

About = Literal["loss", "attention", "inside", "text", "trigger"]

TABLES: Mapping[About, str] = {
    "loss": "Loss and learning rate",
    "attention": "Where the attention goes",
    "inside": "Activations, eight bits and windows",
    "text": "Text and lengths that it was not trained for",
    "trigger": "The trigger task",
}
"""What a column is about, and the heading of the table that it stands in."""

GROUPS: Mapping[Source, str] = {
    "chosen": "trained at the operation's own learning rate, on the seeds of the evaluation",
    "rates": "trained at five learning rates, on the seeds of the selection",
    "scale": "trained at the learning rate of the scale, on the seeds of the evaluation",
    "longer": "trained at the own rate with ALiBi positions, which do not end at the context, on three seeds of the evaluation",
    "trigger": "the trigger task of Ran-Milo 2026 (arXiv 2603.11487), one layer with one head, as published",
}


READ_OUTS: Mapping[Source, tuple[str, ...]] = dict.fromkeys(GROUPS, ()) | {
    "chosen": ("sinks", "effective", "training", "norms", "outliers", "int8", "window", "robustness"),
    "scale": ("carried", "window"),
    "longer": ("extrapolation",),
}
"""What is read from the models of each training, beside how it ended."""


METRICS = (
    Metric("distortion", "nats", "window_gap, on natural text sink_worth, and int8_gap together, each from 0 on."),
    Metric(
        "chosen_factor",
        "ratio",
        "Learning rate with the lowest mean held-out loss over the seeds of the selection, over that of the scale; of 1/4, "
        "1/2, 1, 2 and 4, without those at which a training diverged.",
    ),
    Metric("rate_range", "nats", "Largest less lowest mean loss over the learning rates at which no training diverged."),
    Metric("rate_diverged", "fraction", "Share of the trainings of the selection that diverged.", range=FRACTION),
    Metric("scale_rate_loss", "nats", "held_out_loss at the learning rate of the scale."),
    Metric("scale_rate_sink", "percent", "carried_rate at the learning rate of the scale.", range=PERCENTAGE),
    Metric("scale_rate_window", "nats", "window_gap at the learning rate of the scale."),
    Metric("scale_rate_worth", "nats", "sink_worth at the learning rate of the scale; of natural text alone."),
    Metric("tuning_gain", "nats", "scale_rate_loss - held_out_loss."),
    Metric(
        "trigger_solved",
        "fraction",
        "1 where a seed met the stop rule of the trigger task, else 0; of several the share.",
        outcome=True,
        range=FRACTION,
    ),
    Metric("trigger_steps", "steps", "Steps to the stop rule of the trigger task, or the cap."),
    Metric("trigger_error", "coordinate", "Largest error on fresh sequences of the trigger task.", over_seeds="max"),
)
"""Numbers of the comparison alone; the others are those of trainings and read-outs."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One number of every operation: its metric, and the table and heading under which it stands.

    Args:
        read: metric that it is read from, in another training; the same as ``name`` if empty.
        form: format of the number.
        natural: whether it is there of natural text alone.
    """

    name: str
    heading: str
    source: Source
    about: About
    read: str = ""
    form: str = ".3f"
    natural: bool = False

    @property
    def of(self) -> str:
        """The metric that it is read from."""
        return self.read or self.name

    @property
    def metric(self) -> Metric:
        """What it is, as declared where it is measured."""
        metric = declared(self.name)
        assert metric is not None
        return metric

    def written(self, number: float) -> str:
        """A number of it; what rounds to zero has no sign."""
        return format(number, f"z{self.form}")


COLUMNS: tuple[Column, ...] = (
    Column("held_out_loss", "loss", "chosen", "loss"),
    Column("chosen_factor", "rate", "rates", "loss", form="g"),
    Column("scale_rate_loss", "loss at ×1", "scale", "loss", "held_out_loss"),
    Column("scale_rate_sink", "sink at ×1", "scale", "attention", "carried_rate", ".1f"),
    Column("scale_rate_window", "window gap at ×1", "scale", "inside", "window_gap"),
    Column("scale_rate_worth", "sink worth at ×1", "scale", "inside", "sink_worth", natural=True),
    Column("tuning_gain", "gain by rate", "scale", "loss"),
    Column("rate_range", "range over rates", "rates", "loss"),
    Column("rate_diverged", "diverged", "rates", "loss", form=".2f"),
    Column("effective_sink_rate", "effective sink rate", "chosen", "attention", form=".1f"),
    Column("sink_rate", "sink rate", "chosen", "attention", form=".1f"),
    Column("sink_rate_star", "sink rate of the null score", "chosen", "attention", form=".1f"),
    Column("effective_first", "effective weight on first", "chosen", "attention"),
    Column("first_attention", "weight on first", "chosen", "attention"),
    Column("null_mass", "null mass", "chosen", "attention"),
    Column("massive_ratio", "largest / median", "chosen", "inside", form=".1f"),
    Column("hidden_ratio", "first norm", "chosen", "inside", form=".2f"),
    Column("kurtosis", "kurtosis", "chosen", "inside", form=".1f"),
    Column("int8_gap", "int8 gap", "chosen", "inside", form=".4f"),
    Column("window_gap", "window gap", "chosen", "inside"),
    Column("sink_worth", "sink worth", "chosen", "inside"),
    Column("distortion", "distortion", "chosen", "inside"),
    Column("noise_gap", "noise gap", "chosen", "text"),
    Column("other_language_gap", "other language", "chosen", "text"),
    Column("false_sink_gap", "false sink", "chosen", "text"),
    Column("loss_spikes", "spikes", "chosen", "loss", form=".1f"),
    Column("longer_gap", "4 × context", "longer", "text"),
    Column("trigger_solved", "trigger", "trigger", "trigger", form=".2f"),
    Column("trigger_steps", "trigger steps", "trigger", "trigger", form=",.0f"),
    Column("trigger_error", "trigger error", "trigger", "trigger", form=".4f"),
)
"""In the order of the table."""

DECIDING = (
    *("held_out_loss", "scale_rate_loss", "scale_rate_sink", "scale_rate_window"),
    *("effective_sink_rate", "hidden_ratio", "window_gap", "int8_gap"),
)
"""Columns on which the answers rest."""

ON_NATURAL_TEXT = {"window_gap": "sink_worth", "scale_rate_window": "scale_rate_worth"}
"""Column to the one in its place where the text is natural: there a window loses context, too, and not the sink alone."""
