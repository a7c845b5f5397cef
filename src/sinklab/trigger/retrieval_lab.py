"""run_retrieval_lab(): operations and seeds on key-query retrieval, as records and rows of the long table."""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sinklab import __version__
from sinklab.attention.operation import Operation
from sinklab.auditing.output import check_free, new_run_id, whole_folder
from sinklab.errors import ConfigurationError
from sinklab.registry import operations
from sinklab.results.table import make_table, write_json, write_table
from sinklab.theory.retrieval_task import divisor_error
from sinklab.trigger.expressible import divisor_quotient, linear_in_values
from sinklab.trigger.lab import label_of
from sinklab.trigger.retrieval import RetrievalSetting, read_retrieval, train_retrieval

__all__ = ["run_retrieval_lab"]

PROBE, VERSION = "retrieval", 1
UNITS = {"error": "coordinate"}
"""Of the metrics; all others are weights."""


def run_retrieval_lab(
    operations: Sequence[Operation],
    seeds: Sequence[int] = (0, 1, 2),
    setting: RetrievalSetting | None = None,
    *,
    sequences: int = 1000,
    out: Path | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """Train every operation with every seed and read out what its head does.

    Args:
        operations: what takes the place of softmax; at least one.
        seeds: of initial weights and data; at least one.
        sequences: how many are evaluated.
        out: directory for table.parquet, runs.json and run.json.
        progress: called with a stage, what is done of it, and its total.

    Returns:
        A record for every run: ``operation, seed, target, steps, outcome, train_error, cpu_seconds`` and the fields of
        :class:`~sinklab.trigger.retrieval.RetrievalReadout`; numbers that are not finite are ``None``.

    Raises:
        ConfigurationError: nothing to train, a setting out of its range, or an operation that provably cannot do the task.
        InputError: the directory exists or cannot be made.
    """
    setting = RetrievalSetting() if setting is None else setting
    setting.check()
    if not operations or not seeds or sequences < 1:
        raise ConfigurationError(
            f"retrieval: {len(operations)} operations, {len(seeds)} seeds and {sequences} sequences; expected one of each"
        )
    for operation in operations:
        _require_possible(operation, setting)
    if out is not None:
        check_free(out, overwrite)
    started, runs = time.time(), []
    pairs = [(operation, seed) for operation in operations for seed in seeds]
    for number, (operation, seed) in enumerate(pairs):
        progress("runs", number, len(pairs))
        begun = time.process_time()
        trained = train_retrieval(operation, setting, seed, lambda done, total: progress("steps of this run", done, total))
        seconds = time.process_time() - begun
        record = {
            "operation": _label(operation),
            "seed": seed,
            "target": setting.target,
            "steps": trained.steps,
            "outcome": trained.outcome,
            "train_error": trained.error,
            **read_retrieval(trained.model, setting, sequences).to_dict(),
            "cpu_seconds": round(seconds, 3),
        }
        runs.append(
            {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
        )
    progress("runs", len(pairs), len(pairs))
    if out is not None:
        _write(out, runs, operations, seeds, setting, sequences, started)
    return runs


def _label(operation: Operation) -> str:
    """The name, with the settings that are not the operation's own."""
    return label_of(operation, operations.make(operation.name))


def _require_possible(operation: Operation, setting: RetrievalSetting) -> None:
    """Refuse an operation whose weights are divided by a number of keys: see :mod:`sinklab.theory.retrieval_task`."""
    quotient = divisor_quotient(operation, 3) if linear_in_values(operation) else None
    if quotient is None:
        return
    least = divisor_error(1.0, quotient)
    if least > setting.tolerance:
        raise ConfigurationError(
            f"operation {_label(operation)!r} cannot do the task: its weights are divided by the number of visible "
            f"keys, and one value is to be given whatever their number; every choice of maps is off by {least:.3g} or more "
            "somewhere. relu:power=0 is not divided"
        )


def _write(
    out: Path,
    runs: list[dict[str, Any]],
    operations: Sequence[Operation],
    seeds: Sequence[int],
    setting: RetrievalSetting,
    sequences: int,
    started: float,
) -> None:
    run_id = new_run_id()
    named = {"operation", "seed", "target", "outcome", "steps", "cpu_seconds", "train_error"}
    rows: list[dict[str, Any]] = []
    for run in runs:
        place = {"operation": run["operation"], "seed": run["seed"]}
        rows.append({**place, "metric": "steps", "value": run["steps"], "unit": "steps", "count": 1})
        rows += [
            {
                **place,
                "metric": name,
                "value": value,
                "unit": UNITS.get(name, "weight"),
                "count": sequences,
                "layer": 0,
                "head": 0,
            }
            for name, value in run.items()
            if name not in named and value is not None
        ]
    table = make_table(
        rows,
        run_id=run_id,
        model="retrieval 1x1",
        corpus=f"retrieval_task {setting.target}",
        bos=1,
        probe=PROBE,
        version=VERSION,
    )
    record = {
        "run_id": run_id,
        "kind": "retrieval",
        "config": {**dataclasses.asdict(setting), "sequences": sequences},
        "seeds": list(seeds),
        "operations": [operation.to_dict() for operation in operations],
        "versions": {"sinklab": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "hardware": {"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "dtype": "float32",
        "wall_seconds": round(time.time() - started, 3),
    }
    with whole_folder(out) as folder:
        write_table(table, folder / "table.parquet")
        write_json({"runs": runs}, folder / "runs.json")
        write_json(record, folder / "run.json")
