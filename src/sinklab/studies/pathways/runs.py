"""From the rows of the comparison to numbers: trainings in the store that claims share, read-outs, and the trigger task."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.jobs.cell import SweepPlan
from sinklab.jobs.claim import Changes, Times, Variant
from sinklab.jobs.grid import Cell
from sinklab.jobs.scale import Base, Scale, is_natural
from sinklab.registry import operations
from sinklab.results.naming import counted
from sinklab.results.run import Progress
from sinklab.studies.pathways.choosing import FACTORS, SELECTION_SEEDS, Choice, Losses, check_apart
from sinklab.studies.pathways.columns import COLUMNS, ON_NATURAL_TEXT, READ_OUTS, Source
from sinklab.studies.pathways.operations import Pathway
from sinklab.studies.reproduce import work
from sinklab.studies.reproduce.cells import make_cells
from sinklab.studies.reproduce.scales import SECONDS_OF_A_TRAINING, SECONDS_ON_A_GPU
from sinklab.studies.trigger.expressible import obstacle
from sinklab.studies.trigger.lab import label_of, run_lab
from sinklab.studies.trigger.problem import TriggerProblem
from sinklab.training.config import PretrainingConfig

__all__ = [
    "LONGER_SEEDS",
    "Design",
    "Measurements",
    "Numbers",
    "cells_of",
    "combined",
    "evaluation_cells",
    "factors_of",
    "foreseen",
    "join_numbers",
    "train_and_read",
    "trigger_numbers",
]

Numbers = dict[int, dict[str, dict[str, float]]]
"""Seed to label to column to number; a number that could not be taken is absent."""

LONGER: Changes = {"model.position": {"name": "alibi"}}

LONGER_SEEDS = 3
"""Seeds of the evaluation, from the first on, that are trained with ALiBi positions too: it is one column, and no bound."""

SAMPLES_OF_TRIGGER = 1000
"""That a model of the trigger task is evaluated on."""

SECONDS_OF_READING, SECONDS_OF_A_TRIGGER = 6.0, 15.0
"""Of one core: all read-outs of one tiny model, and one training on the trigger task."""


@dataclasses.dataclass(frozen=True)
class Design:
    """What is compared.

    Args:
        pathways: the reference first.
        widths: label to the width of the feed-forward layer (:func:`~sinklab.studies.pathways.matching.matched_widths`).
        seeds: of the evaluation; none on which rates are chosen.
        rate: one learning rate for all, over that of the scale; ``None`` for a search that gives each operation its own.
        dtype: of the products; by default what suits this machine.
    """

    pathways: Sequence[Pathway]
    widths: Mapping[str, int]
    scale: Scale
    base: Base
    seeds: Sequence[int]
    rate: float | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Numbers, and what is to be said about how they came about.

    Attributes:
        choices: label to the learning rate of the operation.
        cells: training to label to seed to the name of its cell in the store; of ``rates`` factor and seed, ``2 seed 1000``.
        errors: trainings and read-outs that failed, one sentence each.
        held_out_sha256: of the tokens that losses are of; "" where no model was trained.
    """

    numbers: Numbers
    choices: dict[str, Choice]
    cells: dict[Source, dict[str, dict[str, str]]]
    errors: list[str]
    held_out_sha256: str


def cells_of(
    design: Design, seeds: Sequence[int], factors: Mapping[str, float], extra: Changes | None = None
) -> dict[tuple[str, int], Cell]:
    """Label and seed to the training at a multiple of the scale's learning rate.

    Args:
        factors: label to the multiple; others are left out.
        extra: what is changed besides.
    """

    def variant(pathway: Pathway) -> Variant:
        def changes(config: PretrainingConfig) -> Changes:
            return {
                **(extra or {}),
                "model.operation": pathway.operation(config.model.max_position_embeddings),
                "model.intermediate_size": design.widths[pathway.label],
                "optimizer.learning_rate": Times(factors[pathway.label]),
            }

        return Variant(pathway.label, changes)

    variants = [variant(pathway) for pathway in design.pathways if pathway.label in factors]
    return make_cells(variants, design.scale, seeds, design.base, design.dtype)


def selection_cells(design: Design) -> dict[float, dict[tuple[str, int], Cell]]:
    """Factor to label and seed to the trainings by which rates are chosen: those of the selection seeds and no others.

    None where one rate is given for all.
    """
    if design.rate is not None:
        return {}
    labels = [pathway.label for pathway in design.pathways]
    return {factor: cells_of(design, SELECTION_SEEDS[design.scale], dict.fromkeys(labels, factor)) for factor in FACTORS}


def evaluation_cells(design: Design, factors: Mapping[str, float]) -> dict[Source, dict[tuple[str, int], Cell]]:
    """The trainings on the seeds of the evaluation; of operations that no rate was found for, those at the scale's alone.

    Where one rate is given for all, the trainings at that rate are all.
    """
    if design.rate is not None:
        return {"chosen": cells_of(design, design.seeds, factors)}
    return {
        "chosen": cells_of(design, design.seeds, factors),
        "scale": cells_of(design, design.seeds, {pathway.label: 1.0 for pathway in design.pathways}),
        "longer": cells_of(design, design.seeds[:LONGER_SEEDS], factors, LONGER),
    }


def factors_of(design: Design, choices: Mapping[str, Choice]) -> dict[str, float]:
    """Label to the learning rate of the evaluation over that of the scale; operations that no rate was found for are absent."""
    if design.rate is not None:
        return {pathway.label: design.rate for pathway in design.pathways}
    return {label: choice.factor for label, choice in choices.items() if choice.factor is not None}


def foreseen(design: Design) -> str:
    """What the comparison takes if nothing of it is there yet, in a sentence."""
    first = len(design.pathways) * len(FACTORS) * len(SELECTION_SEEDS[design.scale])
    chosen, longer = len(design.pathways) * len(design.seeds), len(design.pathways) * min(LONGER_SEEDS, len(design.seeds))
    least, most, in_trigger = first + chosen + longer, first + 2 * chosen + longer, chosen
    words = f"{counted(len(design.pathways), 'operation')}, base {design.base}: "
    if design.rate is None:
        words += f"{first} trainings to choose learning rates, then {least - first} to {most - first} to evaluate them, "
        words += f"and {in_trigger} of the trigger task"
    else:
        least, most, in_trigger = chosen, chosen, 0
        words += f"{counted(chosen, 'training')} at {design.rate:g} times the learning rate of the scale"
    seconds = SECONDS_OF_A_TRAINING.get(design.scale)
    if seconds is not None:
        besides = chosen * SECONDS_OF_READING + in_trigger * SECONDS_OF_A_TRIGGER
        of_core = [of * seconds + besides for of in (least, most)]
        on_gpu = SECONDS_ON_A_GPU.get(design.scale)
        if on_gpu is None:
            words += f"; about {_span(of_core, 60, 'minute')} of one core"
        else:
            of_gpu = _span([of * on_gpu for of in (least, most)], 60, "minute")
            words += f"; trainings take about {of_gpu} of one data-centre GPU; "
            words += f"without a GPU about {_span(of_core, 3600, 'hour')} of one core"
    return f"{words}; what is there already is not done again"


def _span(seconds: Sequence[float], unit: int, noun: str) -> str:
    """From least to most, in whole units of so many seconds, one at least: ``1 minute``, ``91 to 125 minutes``."""
    *before, last = sorted({max(1, round(some / unit)) for some in seconds})
    return f"{before[0]:,} to {counted(last, noun)}" if before else counted(last, noun)


def train_and_read(
    design: Design,
    *,
    store: Path,
    cache: Path,
    jobs: int | None,
    retries: int,
    ray: str | None,
    progress: bool,
) -> Measurements:
    """Choose a learning rate for every operation if none is given, train what is missing in the store, and read it out.

    Args:
        store: output directory of ``sinklab reproduce``, whose trained models are used and added to.

    Raises:
        ConfigurationError: seeds of the evaluation on which rates are chosen, a training that cannot be, or a machine that
            cannot run it.
        InputError: a text or directory that cannot be used.
        KeyboardInterrupt: after running trainings have stopped with a checkpoint.
    """
    check_apart(design.seeds, design.scale)
    train = functools.partial(
        work.train_and_read,
        scale=design.scale,
        store=store,
        cache=cache,
        jobs=jobs,
        retries=retries,
        ray=ray,
        progress=progress,
    )
    selection = selection_cells(design)
    choices: dict[str, Choice] = {}
    errors: dict[str, str] = {}
    if design.rate is None:
        plan, errors = train(_by_name(selection), [])
        choices = {
            pathway.label: Choice(_losses(pathway.label, selection, plan), SELECTION_SEEDS[design.scale])
            for pathway in design.pathways
        }
    evaluation = evaluation_cells(design, factors_of(design, choices))
    read = [
        (cell.name, read_out)
        for source, cells in evaluation.items()
        for cell in cells.values()
        for read_out in READ_OUTS[source]
    ]
    plan, later_errors = train(_by_name(evaluation), read)
    trained = {
        source: {key: plan.folder / cell.name for key, cell in cells.items() if plan.outcome(cell.name) is not None}
        for source, cells in evaluation.items()
    }
    raw = {
        source: {key: work.read_numbers(folder, READ_OUTS[source]) for key, folder in folders.items()}
        for source, folders in trained.items()
    }
    failures = [f"{name}: {why}" for name, why in (errors | later_errors).items()]
    failures += [f"{label}: {_why_none(choice)}" for label, choice in choices.items() if choice.factor is None]
    any_trained = next((folder for folders in trained.values() for folder in folders.values()), None)
    return Measurements(
        numbers=combined(raw, design.seeds, natural=is_natural(design.scale)),
        choices=choices,
        cells=_cell_names(selection, evaluation),
        errors=failures,
        held_out_sha256="" if any_trained is None else work.held_out_text(any_trained),
    )


def _by_name(groups: Mapping[Any, Mapping[tuple[str, int], Cell]]) -> dict[str, Cell]:
    return {cell.name: cell for cells in groups.values() for cell in cells.values()}


def _cell_names(
    selection: Mapping[float, Mapping[tuple[str, int], Cell]], evaluation: Mapping[Source, Mapping[tuple[str, int], Cell]]
) -> dict[Source, dict[str, dict[str, str]]]:
    """Training to label to seed to the name of the cell, as :class:`Measurements` has them."""
    names: dict[Source, dict[str, dict[str, str]]] = {"rates": {}} if selection else {}
    for source, cells in evaluation.items():
        names[source] = {}
        for (label, seed), cell in cells.items():
            names[source].setdefault(label, {})[str(seed)] = cell.name
    for factor, cells in selection.items():
        for (label, seed), cell in cells.items():
            names["rates"].setdefault(label, {})[f"{factor:g} seed {seed}"] = cell.name
    return names


def _losses(label: str, selection: Mapping[float, Mapping[tuple[str, int], Cell]], plan: SweepPlan) -> Losses:
    """Held-out losses of one operation by factor and selection seed; ``None`` for a training that diverged."""
    losses: dict[float, dict[int, float | None]] = {}
    for factor, cells in selection.items():
        losses[factor] = {}
        for (of_label, seed), cell in cells.items():
            if of_label == label and plan.outcome(cell.name) is not None:
                numbers = work.read_numbers(plan.folder / cell.name, ())
                loss = numbers.get("held_out_loss", math.nan)
                if numbers["diverged"] or math.isfinite(loss):
                    losses[factor][seed] = None if numbers["diverged"] else loss
    return losses


def _why_none(choice: Choice) -> str:
    if choice.missing:
        return f"no learning rate is chosen, since {choice.missing} trainings of the selection are missing; run it again"
    return "no learning rate is chosen, since trainings diverged at every one"


def combined(
    raw: Mapping[Source, Mapping[tuple[str, int], Mapping[str, float]]], seeds: Sequence[int], *, natural: bool = False
) -> Numbers:
    """The columns of the comparison from the numbers of its trainings.

    Args:
        raw: training to label and seed to metric to number.
        natural: the text is natural (:data:`~sinklab.studies.pathways.columns.ON_NATURAL_TEXT`).
    """
    window = ON_NATURAL_TEXT["window_gap"] if natural else "window_gap"
    numbers: Numbers = {seed: {} for seed in seeds}
    for source, of_source in raw.items():
        for (label, seed), measured in of_source.items():
            row = numbers[seed].setdefault(label, {})
            for column in COLUMNS:
                if column.natural and not natural:
                    continue
                if column.source == source and column.of in measured and math.isfinite(measured[column.of]):
                    row[column.name] = measured[column.of]
    for row in (row for by_label in numbers.values() for row in by_label.values()):
        if "scale_rate_loss" in row and "held_out_loss" in row:
            row["tuning_gain"] = row["scale_rate_loss"] - row["held_out_loss"]
        if window in row and "int8_gap" in row:
            row["distortion"] = max(0.0, row[window]) + max(0.0, row["int8_gap"])
    return numbers


def trigger_numbers(
    design: Design, problem: TriggerProblem, folder: Path, progress: Progress
) -> tuple[Numbers, dict[str, str]]:
    """Columns of the trigger task, and for operations that provably cannot do it, why; those are not trained.

    None where one rate is given for all: the task knows neither scale nor rate, and is run where rates are searched for.

    Args:
        folder: of the trigger lab, which keeps its models there. Several comparisons may share it, so its table is that of the
            last one.
    """
    if design.rate is not None:
        return {}, {}
    seeds = design.seeds
    chosen = {pathway.label: operations.make(pathway.operation(problem.length)) for pathway in design.pathways}
    numbers: Numbers = {seed: {} for seed in seeds}
    cannot = {label: reason for label, operation in chosen.items() if (reason := obstacle(operation, problem)) is not None}
    label_in_lab = {label_of(operation): label for label, operation in chosen.items() if label not in cannot}
    if label_in_lab:
        trained = [operation for label, operation in chosen.items() if label not in cannot]
        result = run_lab(
            problem,
            trained,
            seeds,
            samples=SAMPLES_OF_TRIGGER,
            anyway=False,
            out=folder,
            overwrite=False,
            resume=True,
            progress=progress,
            keep=False,
        )
        for run in result.summary["runs"]:
            numbers[run["seed"]][label_in_lab[run["operation"]]] = _of_run(run)
    words = {label: f"{why}; the largest error is {error:.3g} or more" for label, (why, error) in cannot.items()}
    for label in cannot:
        for seed in seeds:
            numbers[seed][label] = {"trigger_solved": 0.0}
    return numbers, words


def join_numbers(numbers: Numbers, more: Numbers) -> None:
    """Put the columns of some more numbers beside those that are there."""
    for seed, by_label in more.items():
        for label, values in by_label.items():
            numbers[seed].setdefault(label, {}).update(values)


def _of_run(run: Mapping[str, Any]) -> dict[str, float]:
    numbers = {"trigger_solved": float(run["outcome"] == "solved"), "trigger_steps": float(run["steps"])}
    return numbers if run["max_error"] is None else numbers | {"trigger_error": float(run["max_error"])}
