"""From the rows of the comparison to numbers: trainings in the store that claims share, read-outs, and the trigger task."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.jobs.claim import Changes, Scale, Times, Variant
from sinklab.jobs.grid import Cell
from sinklab.registry import operations
from sinklab.results.run import Progress
from sinklab.studies.pathways.columns import COLUMNS, FAST, READ_OUTS, Source
from sinklab.studies.pathways.operations import Pathway
from sinklab.studies.reproduce import work
from sinklab.studies.reproduce.cells import make_cells
from sinklab.studies.trigger.expressible import obstacle
from sinklab.studies.trigger.lab import label_of
from sinklab.studies.trigger.problem import TriggerProblem
from sinklab.studies.trigger.trigger import trigger
from sinklab.training.config import PretrainingConfig

__all__ = ["CHANGES", "Found", "Numbers", "cells_of", "combined", "train_and_read", "trigger_numbers"]

Numbers = dict[int, dict[str, dict[str, float]]]
"""Seed to label to column to number; a number that could not be taken is absent."""

CHANGES: Mapping[Source, Changes] = {
    "base": {},
    "fast": {"optimizer.learning_rate": Times(FAST)},
    "longer": {"model.position": {"name": "alibi"}},
}
"""What the trainings change besides the operation."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Numbers, and what is to be said about how they came about.

    Attributes:
        cells: training to label to seed to the name of its cell in the store.
        errors: trainings and read-outs that failed, one sentence each.
    """

    numbers: Numbers
    cells: dict[str, dict[str, dict[str, str]]]
    errors: list[str]


def cells_of(pathways: Sequence[Pathway], source: Source, scale: Scale, seeds: Sequence[int]) -> dict[tuple[str, int], Cell]:
    """Label and seed to the training of one kind."""

    def variant(pathway: Pathway) -> Variant:
        def changes(config: PretrainingConfig) -> Changes:
            operation = pathway.operation(config.model.max_position_embeddings)
            return {**CHANGES[source], "model.operation": operation}

        return Variant(pathway.label, changes)

    return make_cells([variant(pathway) for pathway in pathways], scale, seeds)


def train_and_read(
    pathways: Sequence[Pathway],
    *,
    scale: Scale,
    seeds: Sequence[int],
    store: Path,
    cache: Path,
    jobs: int | None,
    retries: int,
    ray: str | None,
    progress: bool,
) -> Found:
    """Train what is missing in the store and read it out.

    Args:
        store: output directory of ``sinklab reproduce``, whose trained models are used and added to.

    Raises:
        ConfigurationError, InputError: a training that cannot be, a machine that cannot run it, or a text or directory that
            cannot be used.
        KeyboardInterrupt: after running trainings have stopped with a checkpoint.
    """
    by_source = {source: cells_of(pathways, source, scale, seeds) for source in CHANGES}
    cells = {cell.name: cell for of_source in by_source.values() for cell in of_source.values()}
    read = [
        (cell.name, read_out)
        for source, of_source in by_source.items()
        for cell in of_source.values()
        for read_out in READ_OUTS[source]
    ]
    plan, errors = work.train_and_read(
        cells, read, scale=scale, store=store, cache=cache, jobs=jobs, retries=retries, ray=ray, progress=progress
    )
    raw = {
        source: {
            key: work.read_numbers(plan.folder / cell.name, READ_OUTS[source])
            for key, cell in of_source.items()
            if plan.outcome(cell.name) is not None
        }
        for source, of_source in by_source.items()
    }
    names: dict[str, dict[str, dict[str, str]]] = {source: {} for source in by_source}
    for source, of_source in by_source.items():
        for (label, seed), cell in of_source.items():
            names[source].setdefault(label, {})[str(seed)] = cell.name
    return Found(combined(raw, seeds), names, [f"{name}: {why}" for name, why in errors.items()])


def combined(raw: Mapping[Source, Mapping[tuple[str, int], Mapping[str, float]]], seeds: Sequence[int]) -> Numbers:
    """The columns of the comparison from the numbers of its trainings.

    Args:
        raw: training to label and seed to metric to number.
    """
    numbers: Numbers = {seed: {} for seed in seeds}
    for source, of_source in raw.items():
        for (label, seed), found in of_source.items():
            row = numbers[seed].setdefault(label, {})
            for column in COLUMNS:
                if column.source == source and column.of in found and math.isfinite(found[column.of]):
                    row[column.name] = found[column.of]
    for (label, seed), found in raw.get("fast", {}).items():
        row = numbers[seed][label]
        if "held_out_loss" in found and "held_out_loss" in row:
            row["fast_gap"] = found["held_out_loss"] - row["held_out_loss"]
    for row in (row for by_label in numbers.values() for row in by_label.values()):
        if "window_gap" in row and "int8_gap" in row:
            row["distortion"] = max(0.0, row["window_gap"]) + max(0.0, row["int8_gap"])
    return numbers


def trigger_numbers(
    pathways: Sequence[Pathway],
    seeds: Sequence[int],
    problem: TriggerProblem,
    folder: Path,
    progress: Progress,
) -> tuple[Numbers, dict[str, str]]:
    """Columns of the trigger task, and for operations that provably cannot do it, why; those are not trained.

    Args:
        folder: of the trigger lab, which keeps its runs there.
    """
    chosen = {pathway.label: operations.make(pathway.operation(problem.length)) for pathway in pathways}
    numbers: Numbers = {seed: {} for seed in seeds}
    cannot = {label: found for label, operation in chosen.items() if (found := obstacle(operation, problem)) is not None}
    label_in_lab = {label_of(operation): label for label, operation in chosen.items() if label not in cannot}
    if label_in_lab:
        trained = [operation for label, operation in chosen.items() if label not in cannot]
        fields = dataclasses.asdict(problem)
        for run in trigger(operation=trained, seeds=seeds, out=folder, resume=True, progress=progress, **fields).summary[
            "runs"
        ]:
            numbers[run["seed"]][label_in_lab[run["operation"]]] = _of_run(run)
    words = {label: f"{why}; the largest error is {error:.3g} or more" for label, (why, error) in cannot.items()}
    for label in cannot:
        for seed in seeds:
            numbers[seed][label] = {"trigger_solved": 0.0}
    return numbers, words


def _of_run(run: Mapping[str, Any]) -> dict[str, float]:
    found = {"trigger_solved": float(run["outcome"] == "solved"), "trigger_steps": float(run["steps"])}
    return found if run["max_error"] is None else found | {"trigger_error": float(run["max_error"])}
