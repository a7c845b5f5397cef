"""The lab of trigger models: every operation with every seed trained on the trigger task, as records and rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.registry import operations, split_specs
from sinklab.results.blocks import Block, Grid, Say, counted
from sinklab.results.metric import STEPS
from sinklab.results.run import Result, Run
from sinklab.results.table import finite, make_table, unpacked
from sinklab.results.version import __version__
from sinklab.studies.arguments import Output
from sinklab.studies.trigger.evaluation import evaluate
from sinklab.studies.trigger.problem import Outcome, Training, TriggerProblem, obstacle, train

AS_RELEASED: dict[str, dict[str, object]] = {"relu": {"uncounted": 1}}
"""Settings that the released models of the task have and the operation by itself has not: ReLU divides by ``max(i - 1, 1)``."""

Spec = str | Mapping[str, object] | Operation


def as_released(spec: Spec) -> Operation:
    """The operation of a spec, checked; a name alone is the operation as the paper's models have it."""
    if isinstance(spec, Operation):
        return spec
    fields = operations.read(spec)
    return cast(Operation, operations.make(fields | AS_RELEASED.get(fields["name"], {}) if len(fields) == 1 else fields))


def operations_of(chosen: str | Sequence[Spec]) -> list[Operation]:
    """The operations of a list with commas, of ``"all"``, or one by one, as the paper's models have them."""
    if isinstance(chosen, str):
        chosen = operations.names() if chosen.strip() == "all" else split_specs(chosen)
    return [as_released(spec) for spec in chosen]


def label_of(operation: Operation) -> str:
    """The name, with the settings that differ from those of the paper's models: ``relu:uncounted=0``."""
    usual = as_released(operation.name).to_dict()
    changed = ",".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in operation.to_dict().items()
        if usual[name] != value
    )
    return f"{operation.name}:{changed}" if changed else operation.name


def run_lab(
    problem: TriggerProblem, chosen: Sequence[Operation], seeds: Sequence[int], output: Output, *, samples: int
) -> Result:
    """Train every operation with every seed and evaluate what was trained; an operation or a seed twice is refused."""
    by_label = {label_of(operation): operation for operation in chosen}
    _check_arguments(problem, [label_of(operation) for operation in chosen], seeds, samples)
    obstacles = {label: obstacle(operation, problem) for label, operation in by_label.items()}
    cannot = [{"operation": label, "reason": found[0], "least_error": found[1]} for label, found in obstacles.items() if found]
    if not (trained := [label for label, found in obstacles.items() if not found]):
        why = "".join(
            f"operation {entry['operation']!r} cannot do the task: {entry['reason']}; every choice of maps is off by "
            f"{entry['least_error']:.3g} or more somewhere. "
            for entry in cannot
        )
        raise ConfigurationError(f"{why}Name another one")
    with Run("trigger", **vars(output), settings=dataclasses.asdict(problem)) as run:
        records, rows = [], []
        jobs = list(itertools.product(trained, seeds))
        for number, (label, seed) in enumerate(jobs):
            run.progress("runs", number, len(jobs))
            operation = by_label[label]
            name = re.sub(r"[^\w.=]", "-", label) + f"-seed{seed}"
            training = _trained(run, problem, operation, seed, name)
            numbers = evaluate(training.model, problem, samples)
            ids = {"operation": label, "seed": seed}
            records.append(
                {
                    "operation": label,
                    "settings": {key: value for key, value in operation.to_dict().items() if key != "name"},
                    **{field: getattr(problem, field) for field in ("layers", "heads")},
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
        run.progress("runs", len(jobs), len(jobs))

        return run.finish(
            table=make_table(
                rows, run_id=run.id, probe="trigger", model=f"trigger {problem.layers}x{problem.heads}", corpus="trigger_task",
                bos=int(problem.bos),
            ),
            summary={"runs": records, "cannot": cannot},
            show=show,
            config={"learning_rate": problem.rate, "samples": samples},
            seeds=list(seeds),
            operations=[operation.to_dict() for operation in chosen],
            loaded=next(training.model.parameters()),
        )  # fmt: skip


def _check_arguments(problem: TriggerProblem, labels: Sequence[str], seeds: Sequence[int], samples: int) -> None:
    """Refuse what cannot be trained, and lists with a value twice, which would count twice as if it were another."""
    problem.check()
    if not labels or not seeds or samples < 2:
        raise ConfigurationError(
            f"trigger lab: {counted(len(labels), 'operation')}, {counted(len(seeds), 'seed')} and "
            f"{counted(samples, 'sample')}; expected at least one, one, and two"
        )
    given: dict[str, Sequence[object]] = {"operation": labels, "seeds": seeds}
    for name, values in given.items():
        if twice := [value for value in values if values.count(value) > 1]:
            raise ConfigurationError(f"`{name}` has {twice[0]} twice; name it once")


def _trained(run: Run, problem: TriggerProblem, operation: Operation, seed: int, name: str) -> Training:
    """A model from the store of the run, or trained now and put there; it is there whole or not at all."""

    def now() -> Training:
        return train(operation, problem, seed, lambda done, total: run.progress("steps of this run", done, total))

    if run.out is None:
        return now()
    model = problem.build(operation, seed)
    settings = {**dataclasses.asdict(problem), "operation": operation.to_dict(), "seed": seed}
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
    "max_error": "largest error",
    "bos_weight_mean": "on BOS, mean",
    "bos_weight_min": "least",
    "bos_weight_bound": "bound",
    "nothing_mean": "null mass",
    "trigger_bos_weight": "trigger on BOS",
}
"""Numbers of a run that the table shows, with their headings."""

WHY = {"solved": "", "cap": ", did not stop", "diverged": ", diverged"}


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """One table; where models have several heads, with how many of them sink."""
    runs = summary["runs"]
    several = any(run["layers"] * run["heads"] > 1 for run in runs)
    rows = []
    for run in runs:
        cells = [run["operation"], run["seed"], f"{run['steps']:,}{WHY[run['outcome']]}"]
        cells += [None if run[name] is None else f"{run[name]:.4f}" for name in COLUMNS]
        if several:
            sinking = run["sinking_heads"]
            cells.append(None if sinking is None else f"{len(sinking)} of {run['layers'] * run['heads']}")
        rows.append(cells)
    yield Grid(["operation", "seed", "steps", *COLUMNS.values(), *(["heads that sink"] if several else [])], rows)
    for entry in summary["cannot"]:
        yield Say(f"{entry['operation']} was not trained: every choice of maps is off by {entry['least_error']:.3g} or more.")
        yield Say(entry["reason"], small=True)
