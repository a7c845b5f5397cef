"""Instrumentation: what measuring the sinks at the default interval costs, as a share of training in the default mode."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _timing import Bar, exit_with
from training_throughput import WARM_UP, between_steps, ten_million

from sinklab.configuration import with_overrides
from sinklab.recipes.emergence import emergence
from sinklab.training.callback import SinkCallback
from sinklab.training.config import PretrainingConfig, WatchConfig
from sinklab.training.train import run_training


def share(config: PretrainingConfig) -> float:
    """CPU time of one measurement, rows of the table included, over that of the steps between two, in percent."""
    steps: list[float] = []
    measurements: list[float] = []
    mark = time.process_time()
    native = SinkCallback._measure

    def timed(self: SinkCallback, *arguments: Any) -> None:
        started = time.process_time()
        native(self, *arguments)
        measurements.append(time.process_time() - started)

    def after_step(step: int) -> None:
        nonlocal mark
        steps.append(time.process_time() - mark)

    def forget(self: SinkCallback, *arguments: Any) -> None:
        nonlocal mark
        timed(self, *arguments)
        mark = time.process_time()

    SinkCallback._measure = forget  # type: ignore[method-assign]
    short = with_overrides(config, ["training.steps=12", "watch.every=1", "data.max_tokens=200000", "data.held_out_rows=32"])
    try:
        with tempfile.TemporaryDirectory() as folder, between_steps(after_step):
            run_training(short, Path(folder) / "run", cache=Path(folder) / "cache", progress=False)
    finally:
        SinkCallback._measure = native  # type: ignore[method-assign]
    every = WatchConfig().every
    step, measurement = min(steps[WARM_UP:-1]), min(measurements)
    print(f"{config.name}: {1e3 * measurement:.0f} ms a measurement, {1e3 * step:.0f} ms a step")
    return 100 * measurement / (every * step)


def measure() -> list[Bar]:
    torch.set_num_threads(1)
    what = f"SinkCallback every {WatchConfig().every} steps, its share of training in the default mode: "
    ten = with_overrides(ten_million(), ["watch.samples=32"])
    small = with_overrides(emergence(), ["training.snapshots=[]", "schedule.warmup_steps=1"])
    return [
        Bar("14", what + "10.6M parameters, 2,048 tokens a step", share(ten), "<=", 2.0, "%"),
        Bar("14", what + "1.5M parameters, 2,048 tokens a step (emergence)", share(small), "<=", 2.0, "%"),
    ]


if __name__ == "__main__":
    exit_with(measure)
