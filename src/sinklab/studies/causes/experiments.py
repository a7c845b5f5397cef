"""Experiments on the sink as a whole that go with the labels of heads: metrics by head, location, key bias, and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from sinklab.errors import ConfigurationError, InputError, MeasurementError, UnsupportedModelError
from sinklab.results.metric import Row
from sinklab.results.run import Progress, silent
from sinklab.sinks import Sinks
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.finding import ExperimentResult
from sinklab.studies.causes.key_bias import key_bias
from sinklab.studies.causes.location import location
from sinklab.studies.causes.massive import massive_activations
from sinklab.studies.causes.read_outs import read_outs
from sinklab.studies.causes.spread import spread
from sinklab.studies.causes.texts import Texts

__all__ = ["EXPERIMENTS", "experiments"]

EXPERIMENTS = {
    "fast": ("read_outs", "location", "key_bias"),
    "full": ("read_outs", "location", "key_bias", "massive", "spread"),
}
"""What each budget has, by the key in the summary."""


def experiments(
    model: nn.Module,
    given: Texts,
    sinks: Sinks,
    effects: Effects,
    *,
    budget: Literal["fast", "full"],
    threshold: float,
    minimal_effect: float,
    batch_size: int,
    seed: int,
    progress: Progress = silent,
) -> tuple[dict[str, dict[str, object] | None], list[Row]]:
    """Run those of a budget.

    Returns:
        By name what each found, ``{"refused": why}`` where a model or its texts do not allow it, ``None`` where the budget
        leaves it out; and rows of the long table.
    """
    samples, readout = given.samples, given.readout
    rest: dict[str, Any] = {"batch_size": batch_size, "readout": readout, "seed": seed}
    runs: dict[str, Callable[[], ExperimentResult]] = {
        "read_outs": lambda: read_outs(
            model, samples, sinks, effects, threshold=threshold, minimal_effect=minimal_effect, batch_size=batch_size
        ),
        "location": lambda: location(model, samples, sinks, threshold=threshold, **rest),
        "key_bias": lambda: key_bias(model, samples, sinks, minimal_effect=minimal_effect, **rest),
        "massive": lambda: massive_activations(model, samples, sinks, **rest),
        "spread": lambda: spread(model, samples, sinks, **rest),
    }
    summary: dict[str, dict[str, object] | None] = {}
    rows: list[Row] = []
    chosen = EXPERIMENTS[budget]
    for name, run in runs.items():
        if name not in chosen:
            summary[name] = None
            continue
        try:
            result = run()
        except (ConfigurationError, InputError, MeasurementError, UnsupportedModelError) as error:
            summary[name] = {"refused": str(error)}
        else:
            summary[name] = result.to_dict()
            rows += result.rows()
        progress("experiments", len([entry for entry in summary.values() if entry is not None]), len(chosen))
    return summary, rows
