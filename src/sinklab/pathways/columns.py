"""The columns of the comparison: what each number is, which training it is read from, and which direction is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

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


@dataclasses.dataclass(frozen=True)
class Column:
    """One number of every operation.

    Args:
        name: in the long table.
        heading: in tables for people.
        metric: of the read-out; the same as ``name`` if empty.
        form: format of the number.
    """

    name: str
    heading: str
    unit: str
    source: Source
    text: str
    metric: str = ""
    form: str = ".3f"

    @property
    def of(self) -> str:
        """The metric that it is read from."""
        return self.metric or self.name


COLUMNS: tuple[Column, ...] = (
    Column("held_out_loss", "loss", "nats", "base", "held-out loss at the end of the training"),
    Column("sink_rate", "sink rate", "percent", "base", "of the first token (Gu et al. 2024, arXiv 2410.10781)", form=".1f"),
    Column("sink_rate_star", "sink rate on nothing", "percent", "base", "the same rule for the mass on nothing", form=".1f"),
    Column("first_attention", "weight on first", "fraction", "base", "mean row-normalised weight on the first token"),
    Column("null_mass", "null mass", "fraction", "base", "mean mass on nothing, where rows have a fixed sum"),
    Column("massive_ratio", "largest / median", "ratio", "base", "largest activation over the median of its row", form=".1f"),
    Column("hidden_ratio", "first norm", "ratio", "base", "norm of the first hidden state over that of others", form=".2f"),
    Column("kurtosis", "kurtosis", "ratio", "base", "of attention outputs; 3 for a Gaussian", form=".1f"),
    Column("int8_gap", "int8 gap", "nats", "base", "loss with 8-bit weights and activations less the float loss", form=".4f"),
    Column(
        "window_gap", "window gap", "nats", "base", "loss with a window of a quarter of the context and no sinks, less dense"
    ),
    Column("sink_worth", "sink worth", "nats", "base", "what of the window gap the first four tokens give back"),
    Column("distortion", "distortion", "nats", "base", "window gap and int8 gap together, each from 0 on"),
    Column("loss_spikes", "spikes", "count", "base", "training-loss records 0.5 nats above the best before", form=".1f"),
    Column("fast_gap", "rate ×4", "nats", "fast", "held-out loss at four times the learning rate, less that at the scale's"),
    Column("fast_spikes", "spikes ×4", "count", "fast", "loss spikes at four times the rate", "loss_spikes", ".1f"),
    Column("fast_diverged", "diverged ×4", "fraction", "fast", "share of the seeds that diverged there", "diverged", ".2f"),
    Column("longer_gap", "4 × context", "nats", "longer", "loss beyond the context of the training less that at its end"),
    Column("trigger_solved", "trigger", "fraction", "trigger", "share of the seeds that met the stop rule", form=".2f"),
    Column("trigger_steps", "trigger steps", "steps", "trigger", "steps to the stop rule, or the cap", form=",.0f"),
    Column("trigger_error", "trigger error", "coordinate", "trigger", "largest error on fresh sequences", form=".4f"),
    Column(
        "train_time", "train time", "ratio", "cost", "forward and backward over softmax's, at the scale's context", form=".2f"
    ),
    Column("forward_time", "forward time", "ratio", "cost", "forward over softmax's, at the scale's context", form=".2f"),
    Column(
        "train_time_long",
        "train, long",
        "ratio",
        "cost",
        "the same at 1,024 tokens or the context, if it is longer",
        form=".2f",
    ),
    Column("forward_time_long", "forward, long", "ratio", "cost", "likewise", form=".2f"),
    Column("parameters", "parameters", "ratio", "cost", "number of parameters over softmax's", form=".4f"),
)
"""In the order of the table."""
