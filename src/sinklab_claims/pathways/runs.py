"""The trainings of the comparison, from learning rates to numbers: a store that claims share, read-outs, the trigger task.

A rate that suits softmax need not suit another operation, and one rate for all compares an operation that is tuned with others
that are not. So each operation is trained at five rates, on seeds of its own, and the one with the lowest mean held-out loss is
its own; what is then evaluated was not looked at.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.jobs.cell import SweepPlan
from sinklab.jobs.grid import Cell
from sinklab.registry import operations
from sinklab.results.naming import counted
from sinklab.results.progress import duration
from sinklab.results.run import Progress
from sinklab.studies.trigger.expressible import obstacle
from sinklab.studies.trigger.lab import label_of, run_lab
from sinklab.studies.trigger.problem import TriggerProblem
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import SCALES, Base, Changes, Scale, Times, Variant, is_natural
from sinklab_claims.contract.scales import SECONDS_OF_A_TRAINING, SECONDS_ON_A_GPU
from sinklab_claims.pathways.columns import COLUMNS, ON_NATURAL_TEXT, READ_OUTS, Source
from sinklab_claims.pathways.operations import Pathway
from sinklab_claims.reproduce import store as work
from sinklab_claims.reproduce.cells import make_cells

__all__ = [
    "FACTORS",
    "SELECTION_SEEDS",
    "Choice",
    "Design",
    "Measurements",
    "Numbers",
    "combined",
    "evaluation_cells",
    "foreseen",
    "selection_cells",
    "train_and_read",
    "trigger_numbers",
]

FACTORS: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Learning rates that are tried, over that of the scale."""

SELECTION_SEEDS: Mapping[Scale, tuple[int, ...]] = {scale: (1000, 1001) if scale == "tiny" else (1000,) for scale in SCALES}
"""Seeds on which a rate is chosen; none of them is evaluated."""

Losses = Mapping[float, Mapping[int, float | None]]
"""Factor to seed to held-out loss in nats, ``None`` for a training that diverged; one that failed is absent."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The learning rate of one operation, by the losses of every factor of :data:`FACTORS` on every selection seed."""

    losses: Losses
    seeds: tuple[int, ...]

    @property
    def means(self) -> dict[float, float]:
        """Factor to mean loss, of those with which no training diverged or failed."""
        means = {}
        for factor in FACTORS:
            values = [self.losses.get(factor, {}).get(seed) for seed in self.seeds]
            known = [value for value in values if value is not None]
            if values and len(known) == len(values):
                means[factor] = statistics.fmean(known)
        return means

    @property
    def missing(self) -> int:
        """Trainings that have given nothing, not even that they diverged."""
        return sum(seed not in self.losses.get(factor, {}) for factor in FACTORS for seed in self.seeds)

    @property
    def factor(self) -> float | None:
        """That of the lowest mean loss; of equal ones the lowest. ``None`` if a training is missing, or none has a mean."""
        means = self.means
        return None if self.missing or not means else min(means, key=lambda factor: (means[factor], factor))

    @property
    def end(self) -> str:
        """``lowest`` or ``highest`` where the best rate is the end of the range, so that one outside may be better."""
        return {FACTORS[0]: "lowest", FACTORS[-1]: "highest"}.get(self.factor or 0.0, "")

    @property
    def numbers(self) -> dict[str, float]:
        """Columns of the comparison; none if a training is missing."""
        means, losses = self.means, [value for of_factor in self.losses.values() for value in of_factor.values()]
        if self.missing or not losses:
            return {}
        numbers = {"rate_diverged": sum(value is None for value in losses) / len(losses)}
        if self.factor is not None:
            numbers |= {"chosen_factor": self.factor, "rate_range": max(means.values()) - min(means.values())}
        return numbers

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        losses = {
            f"{factor:g}": {str(seed): loss for seed, loss in of_factor.items()} for factor, of_factor in self.losses.items()
        }
        return {"factor": self.factor, "end_of_range": self.end or None, "seeds": list(self.seeds), "losses": losses}


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
    """What is compared: the reference first, with widths of :func:`~sinklab_claims.pathways.operations.matched_widths`.

    ``rate`` is one learning rate for all, over that of the scale; ``None`` for a search that gives each operation its own.
    """

    pathways: Sequence[Pathway]
    widths: Mapping[str, int]
    scale: Scale
    base: Base
    seeds: Sequence[int]
    rate: float | None = None


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
    """Label and seed to the training at the multiple of the scale's rate in ``factors``, with ``extra`` changes besides."""

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
    return make_cells(variants, design.scale, seeds, design.base)


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
    labels = [pathway.label for pathway in design.pathways]
    if design.rate is not None:
        return {"chosen": cells_of(design, design.seeds, dict.fromkeys(labels, design.rate))}
    return {
        "chosen": cells_of(design, design.seeds, factors),
        "scale": cells_of(design, design.seeds, dict.fromkeys(labels, 1.0)),
        "longer": cells_of(design, design.seeds[:LONGER_SEEDS], factors, LONGER),
    }


def foreseen(design: Design) -> str:
    """What the comparison takes if nothing of it is there yet, in a sentence."""
    searched = design.rate is None
    first = len(design.pathways) * len(FACTORS) * len(SELECTION_SEEDS[design.scale]) if searched else 0
    chosen = len(design.pathways) * len(design.seeds)
    most = first + chosen
    if searched:
        most += chosen + len(design.pathways) * min(LONGER_SEEDS, len(design.seeds))
    words = f"{counted(len(design.pathways), 'operation')}, base {design.base}: at most {counted(most, 'training')}"
    words += f", {first} of them to choose learning rates; and {chosen} of the trigger task" if searched else ""
    seconds, on_gpu = SECONDS_OF_A_TRAINING.get(design.scale), SECONDS_ON_A_GPU.get(design.scale)
    if seconds is not None:
        besides = chosen * (SECONDS_OF_READING + (SECONDS_OF_A_TRIGGER if searched else 0))
        words += f"; {duration(most * seconds + besides)} of one core"
        words += "" if on_gpu is None else f", or {duration(most * on_gpu)} of one data-centre GPU"
    return f"{words}; what is there already is not done again"


def train_and_read(
    design: Design, *, store: Path, cache: Path, jobs: int | None, retries: int, ray: str | None, progress: bool
) -> Measurements:
    """Choose a learning rate for every operation if none is given, train what is missing in the store, and read it out.

    Arguments and errors: :func:`sinklab_claims.reproduce.store.train_and_read`.
    """
    how: dict[str, Any] = {"cache": cache, "jobs": jobs, "retries": retries, "ray": ray, "progress": progress}

    def train(cells: Mapping[str, Cell], read: Sequence[tuple[str, str]]) -> tuple[SweepPlan, dict[str, str]]:
        return work.train_and_read(cells, read, scale=design.scale, store=store, **how)

    selection = selection_cells(design)
    choices: dict[str, Choice] = {}
    errors: dict[str, str] = {}
    if design.rate is None:
        plan, errors = train(_by_name(selection), [])
        choices = {
            pathway.label: Choice(_losses(pathway.label, selection, plan), SELECTION_SEEDS[design.scale])
            for pathway in design.pathways
        }
    factors = {label: choice.factor for label, choice in choices.items() if choice.factor is not None}
    evaluation = evaluation_cells(design, factors)
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
    """The columns of the comparison from the numbers of its trainings: training to label and seed to metric to number."""
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

    None where one rate is given for all: the task knows neither scale nor rate, and is run where rates are searched for. The
    trigger lab keeps its models in the folder, which several comparisons may share.
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
        how: dict[str, Any] = {"anyway": False, "overwrite": False, "resume": True, "keep": False, "progress": progress}
        result = run_lab(problem, trained, seeds, samples=SAMPLES_OF_TRIGGER, out=folder, **how)
        for run in result.summary["runs"]:
            numbers[run["seed"]][label_in_lab[run["operation"]]] = _of_run(run)
    words = {label: f"{why}; the largest error is {error:.3g} or more" for label, (why, error) in cannot.items()}
    for label in cannot:
        for seed in seeds:
            numbers[seed][label] = {"trigger_solved": 0.0}
    return numbers, words


def _of_run(run: Mapping[str, Any]) -> dict[str, float]:
    numbers = {"trigger_solved": float(run["outcome"] == "solved"), "trigger_steps": float(run["steps"])}
    return numbers if run["max_error"] is None else numbers | {"trigger_error": float(run["max_error"])}
