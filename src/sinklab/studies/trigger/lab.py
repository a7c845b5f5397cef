"""The lab of trigger models: every operation and seed trained and read: attention maps, sinks, what theory demands."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.registry import operations, split_specs
from sinklab.results.blocks import Block, Grid, Say, counted
from sinklab.results.metric import STEPS, Coordinates, Metric, Row
from sinklab.results.run import Result, Run
from sinklab.results.table import finite, make_table, unpacked
from sinklab.results.version import __version__
from sinklab.studies.arguments import Output
from sinklab.studies.theory.trigger_bounds import counter_of
from sinklab.studies.trigger.problem import Outcome, Training, TriggerModel, TriggerProblem, obstacle, train

EVALUATION_SEED = 1_000_003
"""Seed of the evaluated samples; seeds of training are small numbers."""

SINK = 0.9
"""Mean weight on BOS off the trigger, and mean share of BOS in the weight of a row, from which a head is said to sink.

Uniform rows have 0.16 in samples of 16. Where rows do not sum to one a weight says nothing by itself: that of ``elu`` is 1 on
every key of score 0.
"""

ROW_SUM = 1e-5
"""How far from 1 a row of float32 weights may sum to for the counting bound to apply; 16 roundings are a tenth of it."""

MAX_ERROR = Metric("max_error", "coordinate", "Largest absolute error over the evaluated samples.")
PAPER = "Ran-Milo 2026 (arXiv 2603.11487)"
BY_HEAD = {
    "bos_mean": Metric("bos_weight_mean", "weight", "Mean weight on BOS off the trigger.", paper=PAPER),
    "bos_min": Metric("bos_weight_min", "weight", "Least single weight on BOS off the trigger."),
    "nothing": Metric("nothing_mean", "weight", "Mean off the trigger of the null mass, with that on learned tokens in front."),
    "trigger_bos": Metric("trigger_bos_weight", "weight", "Mean weight of the trigger on BOS."),
    "trigger_averaged": Metric("trigger_averaged_weight", "weight", "Mean weight of the trigger on a token that it averages."),
}
"""Numbers of a head, by the field of :class:`TriggerNumbers`."""
MAPS = {
    "mean": Metric("weight_mean", "weight", "Mean over samples of one attention weight.", paper=PAPER),
    "std": Metric("weight_std", "weight", "Standard deviation over samples of one attention weight.", paper=PAPER),
}


@dataclasses.dataclass(frozen=True, eq=False)
class TriggerNumbers:
    """Numbers of one trained model on samples with the trigger at one position; "off" means queries that are neither first nor
    trigger.

    ``error`` is the largest absolute one, not finite for a model that diverged; ``mean`` and ``std`` attention maps over
    samples, ``(layers, heads, length, length)``; the next are of ``BY_HEAD``, ``(layers, heads)``, ``None`` without BOS or
    null mass. ``bos_share`` is the mean off the trigger of the weight on BOS as a share of all sizes in the row and
    ``nothing``; ``bound`` see :func:`bos_bound`."""

    error: float
    mean: Tensor
    std: Tensor
    bos_mean: Tensor | None
    bos_min: Tensor | None
    bos_share: Tensor | None
    nothing: Tensor | None
    trigger_bos: Tensor | None
    trigger_averaged: Tensor
    bound: float | None

    @property
    def strongest(self) -> tuple[int, int] | None:
        """Layer and head with the largest mean weight on BOS; ``None`` without BOS, or of a model that diverged."""
        if self.bos_mean is None or not math.isfinite(self.error) or not bool(torch.isfinite(self.bos_mean).all()):
            return None
        return divmod(int(self.bos_mean.argmax()), self.bos_mean.shape[1])

    @property
    def sinking(self) -> list[list[int]] | None:
        """Layer and head of those whose mean weight and share of BOS are :data:`SINK` or more; see :attr:`strongest`."""
        if self.bos_mean is None or self.bos_share is None or self.strongest is None:
            return None
        return (self.bos_mean.minimum(self.bos_share) >= SINK).nonzero().tolist()

    def to_dict(self) -> dict[str, object]:
        """For a record; single weights are those of the strongest head. ``None`` where there is no number."""
        at, sound = self.strongest, math.isfinite(self.error)

        def of_strongest(values: Tensor | None) -> float | None:
            return None if at is None or values is None else float(values[at])

        def of_heads(values: Tensor | None) -> list[list[float]] | None:
            return None if at is None or values is None else values.tolist()

        return {
            "max_error": finite(self.error),
            "bos_weight_mean": of_strongest(self.bos_mean),
            "bos_weight_min": of_strongest(self.bos_min),
            "bos_weight_bound": self.bound,
            "nothing_mean": None if self.nothing is None or not sound else finite(float(self.nothing.max())),
            "trigger_bos_weight": of_strongest(self.trigger_bos),
            "trigger_averaged_weight": of_strongest(self.trigger_averaged),
            "strongest_head": None if at is None else list(at),
            "sinking_heads": self.sinking,
            "head_bos_weight_mean": of_heads(self.bos_mean),
            "head_bos_weight_min": of_heads(self.bos_min),
        }

    def rows(self) -> Iterator[Row]:
        """Rows of the table: the error, numbers by head, and the visible part of the maps."""
        yield {"metric": MAX_ERROR, "value": self.error}
        for name, metric in (BY_HEAD | MAPS).items():
            values: Tensor | None = getattr(self, name)
            if values is None:
                continue
            for index, value in zip(torch.ones_like(values).nonzero().tolist(), values.flatten().tolist(), strict=True):
                position = dict(zip(("layer", "head", "query_position", "key_position"), index, strict=False))
                if position.get("key_position", 0) <= position.get("query_position", 0):
                    yield {"metric": metric, **cast(Coordinates, position), "value": value}  # its keys are columns


@torch.no_grad()
def evaluate(model: TriggerModel, problem: TriggerProblem, samples: int = 1000) -> TriggerNumbers:
    """Run a model over fresh samples with the trigger at ``problem.position``; 1,000 of them in the paper."""
    batch = problem.draw(samples, torch.Generator().manual_seed(EVALUATION_SEED), problem.position)
    outputs, per_layer, null_masses = model.with_weights(batch.inputs)
    weights = torch.stack(per_layer, dim=1)  # (batch, layers, heads, query, key)
    masses = [mass for mass in null_masses if mass is not None]
    front, trigger = len(model.front), problem.position - (0 if problem.bos else 1)
    on_data = weights[..., front:, front:]
    off = ~batch.is_trigger
    off[:, 0] = False
    nothing = torch.stack(masses, dim=1) if masses else None
    if front:
        on_front = weights[..., front:, :front].sum(-1)
        nothing = on_front if nothing is None else nothing + on_front
    on_bos = _at(on_data[..., 0], off)
    row = on_data.abs().sum(-1) if nothing is None else on_data.abs().sum(-1) + nothing
    shares = _at(on_data[..., 0].abs() / row.where(row > 0, 1.0), off)
    averaged = slice(1 if problem.bos else 0, trigger + (problem.target == "including"))
    return TriggerNumbers(
        error=float((outputs - problem.answers(batch)).abs().max()),
        mean=on_data.mean(0),
        std=on_data.std(0),
        bos_mean=on_bos.mean(-1) if problem.bos else None,
        bos_min=on_bos.amin(-1) if problem.bos else None,
        bos_share=shares.mean(-1) if problem.bos else None,
        nothing=None if nothing is None else _at(nothing, off).mean(-1),
        trigger_bos=on_data[..., trigger, 0].mean(0) if problem.bos else None,
        trigger_averaged=on_data[..., trigger, averaged].mean(dim=(0, 3)),
        bound=bos_bound(model, weights, outputs, off) if problem.bos else None,
    )


def _at(values: Tensor, chosen: Tensor) -> Tensor:
    """Values ``(batch, layers, heads, queries)`` where ``(batch, queries)`` says so: ``(layers, heads, chosen)``."""
    return values.permute(1, 2, 0, 3)[:, :, chosen]


def bos_bound(model: TriggerModel, weights: Tensor, outputs: Tensor, off: Tensor) -> float | None:
    """Least weight on BOS at queries ``off``, boolean ``(batch, length)``, by mass counting, from outputs and value map alone
    (:mod:`sinklab.studies.theory.trigger_bounds`). ``None`` where an assumption does not hold: several heads or layers,
    learned tokens in front, a gate, an output bias, rows that do not sum to one; or where the model diverged."""
    operation = model.operation
    plain = all(
        getattr(type(operation), part) is getattr(Operation, part) for part in ("gain", "output_bias", "null_value", "finish")
    )
    alone = not model.residual and not len(model.front)
    if not (plain and alone and bool(((weights.sum(-1) - 1).abs() < ROW_SUM).all()) and bool((weights >= 0).all())):
        return None
    value_output = model.attention[0].value_output()[0]
    if not bool(torch.isfinite(value_output).all() and torch.isfinite(outputs).all()):
        return None
    counter = counter_of(value_output)
    error, bos_error = float(outputs[off].abs().max()), float(outputs[:, 0].abs().max())
    return counter.least_bos_weight(error, bos_error)


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
