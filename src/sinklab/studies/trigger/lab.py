"""The lab of trigger models: every operation with every seed trained on a toy problem, as records, rows and pictures."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.registry import operations, split_specs
from sinklab.results.blocks import Block, Grid, Say, counted
from sinklab.results.metric import STEPS
from sinklab.results.run import Progress, Result, Run
from sinklab.results.table import finite, make_table, unpacked
from sinklab.results.version import __version__
from sinklab.studies.trigger.evaluation import TriggerNumbers, evaluate, write_maps
from sinklab.studies.trigger.model import TriggerModel
from sinklab.studies.trigger.problem import Outcome, ToyProblem, Training, TriggerProblem, obstacle, train
from sinklab.studies.trigger.retrieval import RetrievalNumbers, RetrievalProblem, evaluate_retrieval, retrieval_obstacle

AS_RELEASED: dict[str, dict[str, object]] = {"relu": {"uncounted": 1}}
"""Settings that the released models of the task have and the operation by itself has not: ReLU divides by ``max(i - 1, 1)``."""

Spec = str | Mapping[str, object] | Operation


def as_released(spec: Spec) -> Operation:
    """:meth:`~sinklab.registry.Registry.make`; a name alone is the operation as the paper's models have it.

    Raises:
        UnknownNameError: no such operation.
        ConfigurationError: a setting that it does not have.
    """
    if isinstance(spec, Operation):
        return spec
    fields = operations.read(spec)
    return cast(Operation, operations.make(fields | AS_RELEASED.get(fields["name"], {}) if len(fields) == 1 else fields))


def operations_of(chosen: str | Sequence[Spec], make: Callable[[Spec], Operation] = operations.make) -> list[Operation]:
    """The operations of a list with commas, of ``"all"``, or one by one."""
    if isinstance(chosen, str):
        chosen = operations.names() if chosen.strip() == "all" else split_specs(chosen)
    return [make(spec) for spec in chosen]


def label_of(operation: Operation, make: Callable[[str], Operation] = as_released) -> str:
    """The name, with the settings that differ from those that ``make`` gives to a name alone: ``relu:uncounted=0``."""
    usual = make(operation.name).to_dict()
    changed = ",".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in operation.to_dict().items()
        if usual[name] != value
    )
    return f"{operation.name}:{changed}" if changed else operation.name


def require_none_twice(**given: Sequence[object]) -> None:
    """Refuse lists with a value twice: it would be trained twice, and count twice as if it were another.

    Raises:
        ConfigurationError: names the first.
    """
    for name, values in given.items():
        for number, value in enumerate(values):
            if value in values[:number]:
                raise ConfigurationError(f"`{name}` has {value} twice; name it once")


def run_lab(
    problem: ToyProblem,
    chosen: Sequence[Operation],
    seeds: Sequence[int],
    *,
    samples: int,
    anyway: bool,
    out: Path | None,
    overwrite: bool,
    resume: bool,
    progress: Progress | None,
    keep: bool = True,
) -> Result:
    """Train every operation with every seed and evaluate what was trained.

    Args:
        keep: refuse to put the result in the place of one of more operations or seeds; off where only the models in the folder
            are wanted again.

    Raises:
        SinklabError: see :func:`~sinklab.studies.trigger.trigger.trigger`; besides, an operation or a seed twice.
    """
    usual = operations.make if isinstance(problem, RetrievalProblem) else as_released  # what a name alone is
    labels = [label_of(operation, usual) for operation in chosen]
    _check_arguments(problem, labels, seeds, samples)
    by_label = dict(zip(labels, chosen, strict=True))
    obstacles = {label: _obstacle(operation, problem) for label, operation in by_label.items()}
    reasons = {label: reason for label, reason in obstacles.items() if reason is not None}
    trained = labels if anyway else [label for label in labels if label not in reasons]
    cannot = [
        {"operation": label, "reason": reason, "least_error": error} for label, (reason, error) in reasons.items() if not anyway
    ]
    if not trained:
        why = "".join(
            f"operation {entry['operation']!r} cannot do the task: {entry['reason']}; every choice of maps is off by "
            f"{entry['least_error']:.3g} or more somewhere. "
            for entry in cannot
        )
        raise ConfigurationError(f"{why}{problem.hint}To train all the same, set `anyway`")
    grid: dict[str, Sequence[object]] = {
        "operation": [label for label in labels if label not in reasons],
        "anyway": list(reasons) if anyway else [],
        "seeds": list(seeds),
    }
    with Run(
        "trigger",
        out=out,
        overwrite=overwrite,
        resume=resume,
        settings={"task": problem.name, **dataclasses.asdict(problem)},
        grid=grid,
        grid_of=functools.partial(_grid_of, reasons) if keep else None,
        progress=progress,
    ) as run:
        records, rows, pictures = [], [], {}
        jobs = list(itertools.product(trained, seeds))
        for number, (label, seed) in enumerate(jobs):
            run.progress("runs", number, len(jobs))
            operation = by_label[label]
            name = re.sub(r"[^\w.=]", "-", label) + f"-seed{seed}"
            training = _trained(run, problem, operation, seed, name)
            numbers = _evaluated(training.model, problem, samples)
            ids = {"operation": label, "seed": seed}
            records.append(
                {
                    "operation": label,
                    "settings": {key: value for key, value in operation.to_dict().items() if key != "name"},
                    **{field: getattr(problem, field) for field in problem.described},
                    "seed": seed,
                    "steps": training.steps,
                    "outcome": training.outcome,
                    "train_error": finite(training.error),
                    **numbers.to_dict(),
                    "cpu_seconds": round(training.seconds, 3),
                }
            )
            rows.append({**ids, "metric": STEPS, "value": training.steps, "count": 1})
            rows += [{**ids, **row, "value": finite(row["value"]), "count": samples} for row in unpacked(numbers.rows())]
            if isinstance(numbers, TriggerNumbers):
                shape, steps = str(problem.columns["model"]).split()[1].replace("x", " × "), f"{training.steps:,} steps"
                pictures[f"{name}.png"] = numbers, f"{label}, {shape}, seed {seed}: {training.outcome} after {steps}"
        run.progress("runs", len(jobs), len(jobs))

        def draw(folder: Path) -> None:
            for name, (numbers, caption) in pictures.items():
                write_maps(numbers, caption, folder / name)

        return run.finish(
            table=make_table(rows, run_id=run.id, probe=problem.name, **problem.columns),
            summary={"task": problem.name, "runs": records, "cannot": cannot},
            show=show,
            files=draw,
            config={"learning_rate": problem.rate, "samples": samples},
            seeds=list(seeds),
            operations=[operation.to_dict() for operation in chosen],
            loaded=next(training.model.parameters()),
        )


def _evaluated(model: TriggerModel, problem: ToyProblem, samples: int) -> TriggerNumbers | RetrievalNumbers:
    """Numbers of a model on so many fresh samples."""
    if isinstance(problem, RetrievalProblem):
        return evaluate_retrieval(model, problem, samples)
    assert isinstance(problem, TriggerProblem)
    return evaluate(model, problem, samples)


def _obstacle(operation: Operation, problem: ToyProblem) -> tuple[str, float] | None:
    """Why an operation provably cannot do the task, and the least error; ``None`` where there is no proof."""
    if isinstance(problem, RetrievalProblem):
        return retrieval_obstacle(operation, problem)
    assert isinstance(problem, TriggerProblem)
    return obstacle(operation, problem)


def _check_arguments(problem: ToyProblem, labels: Sequence[str], seeds: Sequence[int], samples: int) -> None:
    problem.check()
    if not labels or not seeds or samples < 2:
        raise ConfigurationError(
            f"{problem.name} lab: {counted(len(labels), 'operation')}, {counted(len(seeds), 'seed')} and "
            f"{counted(samples, 'sample')}; expected at least one, one, and two"
        )
    require_none_twice(operation=labels, seeds=seeds)


def _grid_of(hopeless: Collection[str], summary: Mapping[str, Any]) -> dict[str, Sequence[object]]:
    """What a result is of, by the option; ``hopeless`` are the labels of operations that cannot do the task."""
    records = summary.get("runs", [])
    labels = list(dict.fromkeys(record["operation"] for record in records))
    return {
        "operation": [label for label in labels if label not in hopeless],
        "anyway": [label for label in labels if label in hopeless],
        "seeds": list(dict.fromkeys(record["seed"] for record in records)),
    }


def _trained(run: Run, problem: ToyProblem, operation: Operation, seed: int, name: str) -> Training:
    """A model from the store of the run, or trained now and put there; it is there whole or not at all."""

    def now() -> Training:
        return train(operation, problem, seed, lambda done, total: run.progress("steps of this run", done, total))

    if run.out is None:
        return now()
    model = problem.build(operation, seed)
    settings = {"operation": operation.to_dict(), "seed": seed}
    stored = run.store.get(name, settings, __version__)
    if stored is not None:
        model.load_state_dict({key: torch.tensor(values) for key, values in stored.arrays.items()})
        steps, outcome, error, seconds = stored.record
        return Training(model.eval(), steps, cast(Outcome, outcome), math.nan if error is None else error, seconds)
    training = now()
    record = [training.steps, training.outcome, finite(training.error), training.seconds]
    arrays = {key: values.numpy() for key, values in training.model.state_dict().items()}
    run.store.put(name, settings, __version__, record, arrays)
    return training


COLUMNS = {
    "trigger": {
        "max_error": "largest error",
        "bos_weight_mean": "on BOS, mean",
        "bos_weight_min": "least",
        "bos_weight_bound": "bound",
        "nothing_mean": "null mass",
        "trigger_bos_weight": "trigger on BOS",
    },
    "retrieval": {
        "max_error": "largest error",
        "before_bos_mean": "on BOS before the trigger",
        "before_bos_min": "least",
        "behind_bos_mean": "behind it",
        "trigger_asked": "trigger on what it asks for",
        "trigger_bos": "on BOS",
    },
}
"""Numbers of a run that the table of a task shows, with their headings."""

WHY = {"solved": "", "cap": ", did not stop", "diverged": ", diverged"}


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """One table; where models have several heads, with how many of them sink."""
    columns, runs = COLUMNS[summary["task"]], summary["runs"]
    several = any(run.get("layers", 1) * run.get("heads", 1) > 1 for run in runs)
    rows = []
    for run in runs:
        cells = [run["operation"], run["seed"], f"{run['steps']:,}{WHY[run['outcome']]}"]
        cells += [None if run[name] is None else f"{run[name]:.4f}" for name in columns]
        if several:
            sinking = run["sinking_heads"]
            cells.append(None if sinking is None else f"{len(sinking)} of {run['layers'] * run['heads']}")
        rows.append(cells)
    yield Grid(["operation", "seed", "steps", *columns.values(), *(["heads that sink"] if several else [])], rows)
    for entry in summary["cannot"]:
        yield Say(f"{entry['operation']} was not trained: every choice of maps is off by {entry['least_error']:.3g} or more.")
        yield Say(f"{entry['reason']} (--anyway trains it)", small=True)
