"""Experiments on the sink as a whole that go with the labels of heads: metrics by head, location, key bias, and more."""

from __future__ import annotations

import dataclasses
import time
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
from sinklab.studies.causes.spread import spread
from sinklab.studies.causes.texts import Texts
from sinklab.studies.causes.three_metrics import three_metrics

__all__ = ["EXPERIMENTS", "estimate_experiments", "experiments"]

EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fast": ("read_outs", "location", "key_bias"),
    "full": ("read_outs", "location", "key_bias", "massive", "spread"),
}
"""What each budget has, by the key in the summary."""


def experiments(
    model: nn.Module,
    given: Texts,
    sinks: Sinks,
    effects: Effects | None,
    *,
    budget: Literal["fast", "full", "none"],
    threshold: float,
    minimal_effect: float,
    batch_size: int,
    seed: int,
    progress: Progress = silent,
) -> tuple[dict[str, dict[str, object] | None], list[Row]]:
    """Run those of a budget.

    Args:
        effects: of the heads; without them there are no metrics by head.

    Returns:
        By name what each found, ``{"refused": why}`` where a model or its texts do not allow it, ``None`` where the budget
        leaves it out; and rows of the long table.
    """
    samples, readout = given.samples, given.readout
    rest: dict[str, Any] = {"batch_size": batch_size, "readout": readout, "seed": seed}
    runs: dict[str, Callable[[], ExperimentResult]] = {
        "location": lambda: location(model, samples, sinks, threshold=threshold, **rest),
        "key_bias": lambda: key_bias(model, samples, sinks, minimal_effect=minimal_effect, **rest),
        "massive": lambda: massive_activations(model, samples, sinks, **rest),
        "spread": lambda: spread(model, samples, sinks, **rest),
    }
    if effects is not None:
        by_head = effects
        runs = {
            "read_outs": lambda: three_metrics(
                model, samples, sinks, by_head, threshold=threshold, minimal_effect=minimal_effect, batch_size=batch_size
            ),
            **runs,
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


TRIED = (2, 6)
"""Texts of the two trials of an estimate: what does not grow with the texts is in both."""


def estimate_experiments(
    model: nn.Module, given: Texts, sinks: Sinks, *, budget: Literal["fast", "full"], threshold: float, batch_size: int
) -> float:
    """Seconds that :func:`experiments` will take, from trials of all but the metrics by head on a few texts."""
    seconds = []
    for number in TRIED:
        part = dataclasses.replace(given, samples=given.samples.part(0, min(number, len(given.samples))))
        began = time.perf_counter()
        experiments(
            model, part, sinks, None, budget=budget, threshold=threshold, minimal_effect=1.0, batch_size=batch_size, seed=0
        )
        seconds.append(time.perf_counter() - began)
    each = max(0.0, seconds[1] - seconds[0]) / (TRIED[1] - TRIED[0])
    return seconds[0] + each * (len(given.samples) - TRIED[0])
