"""The columns of the comparison: what each number is, which training it is read from, and which direction is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from sinklab.results.metric import Metric, catalogue

__all__ = ["COLUMNS", "FAST", "GROUPS", "READ_OUTS", "Column", "Source"]

Source = Literal["base", "fast", "longer", "trigger", "cost"]

FAST = 4.0
"""Factor on the learning rate of the second training, for the tolerance to it."""

GROUPS: Mapping[Source, str] = {
    "base": "trained as the scale has it",
    "fast": f"trained at {FAST:g} times the learning rate",
    "longer": "trained with ALiBi positions, which do not end at the context",
    "trigger": "the trigger task of Ran-Milo 2026 (arXiv 2603.11487), one layer with one head, as published",
    "cost": "time beside softmax, in turns, in one process; no training",
}

READ_OUTS: Mapping[Source, tuple[str, ...]] = {
    "base": ("sinks", "training", "norms", "outliers", "int8", "window"),
    "fast": ("training",),
    "longer": ("extrapolation",),
    "trigger": (),
    "cost": (),
}
"""What is read from the models of each training."""


DECLARED_HERE = (
    Metric("distortion", "nats", "window_gap and int8_gap together, each from 0 on."),
    Metric("fast_gap", "nats", f"held_out_loss at {FAST:g} times the learning rate, less that at the scale's."),
    Metric("fast_spikes", "count", f"loss_spikes at {FAST:g} times the learning rate."),
    Metric("fast_diverged", "fraction", f"Share of the seeds that diverged at {FAST:g} times the learning rate."),
    Metric("trigger_solved", "fraction", "Share of the seeds that met the stop rule of the trigger task."),
    Metric("trigger_steps", "steps", "Steps to the stop rule of the trigger task, or the cap."),
    Metric("trigger_error", "coordinate", "Largest error on fresh sequences of the trigger task."),
    Metric("train_time", "ratio", "Time of forward and backward over softmax's, at the scale's context."),
    Metric("forward_time", "ratio", "Time of forward over softmax's, at the scale's context."),
    Metric("train_time_long", "ratio", "train_time at 1,024 tokens or the context, if it is longer."),
    Metric("forward_time_long", "ratio", "forward_time at 1,024 tokens or the context, if it is longer."),
    Metric("parameters", "ratio", "Number of parameters over softmax's."),
)
"""Numbers of the comparison alone; the others are those of trainings and read-outs."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One number of every operation.

    Args:
        name: of its metric.
        heading: in tables for people.
        read: metric that it is read from, in another training; the same as ``name`` if empty.
        form: format of the number.
    """

    name: str
    heading: str
    source: Source
    read: str = ""
    form: str = ".3f"

    @property
    def of(self) -> str:
        """The metric that it is read from."""
        return self.read or self.name

    @property
    def metric(self) -> Metric:
        """What it is, as declared where it is measured."""
        return catalogue()[self.name].metric


COLUMNS: tuple[Column, ...] = (
    Column("held_out_loss", "loss", "base"),
    Column("sink_rate", "sink rate", "base", form=".1f"),
    Column("sink_rate_star", "sink rate on nothing", "base", form=".1f"),
    Column("first_attention", "weight on first", "base"),
    Column("null_mass", "null mass", "base"),
    Column("massive_ratio", "largest / median", "base", form=".1f"),
    Column("hidden_ratio", "first norm", "base", form=".2f"),
    Column("kurtosis", "kurtosis", "base", form=".1f"),
    Column("int8_gap", "int8 gap", "base", form=".4f"),
    Column("window_gap", "window gap", "base"),
    Column("sink_worth", "sink worth", "base"),
    Column("distortion", "distortion", "base"),
    Column("loss_spikes", "spikes", "base", form=".1f"),
    Column("fast_gap", "rate ×4", "fast"),
    Column("fast_spikes", "spikes ×4", "fast", "loss_spikes", ".1f"),
    Column("fast_diverged", "diverged ×4", "fast", "diverged", ".2f"),
    Column("longer_gap", "4 × context", "longer"),
    Column("trigger_solved", "trigger", "trigger", form=".2f"),
    Column("trigger_steps", "trigger steps", "trigger", form=",.0f"),
    Column("trigger_error", "trigger error", "trigger", form=".4f"),
    Column("train_time", "train time", "cost", form=".2f"),
    Column("forward_time", "forward time", "cost", form=".2f"),
    Column("train_time_long", "train, long", "cost", form=".2f"),
    Column("forward_time_long", "forward, long", "cost", form=".2f"),
    Column("parameters", "parameters", "cost", form=".4f"),
)
"""In the order of the table."""
