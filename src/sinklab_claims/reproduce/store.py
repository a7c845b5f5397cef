"""Numbers of a store: read-outs of trained models and measurements of a seed, taken in processes of their own and kept.

Every number is an entry of a store (:mod:`sinklab.results.store`) under the weights, the settings and the version of sinklab
that it was taken with, so that a run that was interrupted, or a claim or seed that was added, costs what is missing.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from sinklab.corpora import resolve_corpus
from sinklab.errors import DoesNotApply, UnsupportedModelError
from sinklab.jobs.cell import SweepPlan
from sinklab.jobs.grid import Cell
from sinklab.jobs.processes import run_processes, serve, watching
from sinklab.models.loading import load_model
from sinklab.registry import read_outs
from sinklab.results.folder import from_outside
from sinklab.results.metric import Metric
from sinklab.results.store import Store
from sinklab.results.table import read_run
from sinklab.results.version import __version__
from sinklab_claims.contract.claim import Measure, ReadOut, Scale
from sinklab_claims.contract.trained import Checkpoint, TrainedModel
from sinklab_claims.reproduce.cells import open_store, train_cells
from sinklab_claims.reproduce.claims import claim_called

__all__ = ["Measurement", "OfModel", "held_out_text", "keeping", "name_of", "read_numbers", "run_missing", "train_and_read"]

BATCH = 12
"""Models read in one process: enough that starting it, five seconds where it is no fork, is the smaller part."""

Numbers = dict[str, Any]
"""Plain JSON: ``numbers`` and the ``seconds`` that they took."""


Place = tuple[Path, str, dict[str, object], Sequence[Callable[..., object]]]
"""Folder of a store, name and settings of an entry, and the functions that measure it."""


class _Task(abc.ABC):
    """Something that is measured once and kept."""

    @abc.abstractmethod
    def _place(self) -> Place:
        """Where it is kept, and what measures it."""

    def cached(self) -> Numbers | None:
        """What was measured before: ``numbers``, and of a checkpoint ``reason`` where the claim does not apply."""
        folder, name, settings, functions = self._place()
        entry = Store(folder).get(name, settings, version_of(functions))
        return None if entry is None else entry.record

    def keep(self, measure: Callable[[], object]) -> None:
        """Measure and keep the numbers, or why there are none."""
        folder, name, settings, functions = self._place()
        started, record = time.monotonic(), Numbers(numbers={})
        try:
            record["numbers"] = measure()
        except (DoesNotApply, UnsupportedModelError) as error:
            if not isinstance(self, OfModel):
                raise
            record["reason"] = str(error)
        record["seconds"] = round(time.monotonic() - started, 2)
        Store(folder).put(name, settings, version_of(functions), record)


@dataclasses.dataclass(frozen=True)
class Reading(_Task):
    """One read-out, a registered name or ``claim.function``, of the trained model in a run folder."""

    folder: Path
    read_out: str

    def _place(self) -> Place:
        settings = {"run": read_run(self.folder)["run_id"], "weights": TrainedModel(self.folder, self.folder).weights}
        return self.folder / "read_outs", self.read_out, settings, [function_of(self.read_out)]

    def cached(self) -> Numbers | None:
        return super().cached() if self.readable() else None

    def take(self, trained: TrainedModel) -> None:
        """Read the numbers and keep them."""
        self.keep(lambda: _plain(function_of(self.read_out)(trained)))

    def readable(self) -> bool:
        """Whether there is something to read; of a run that diverged only if the function has a true ``of_diverged``."""
        status = read_run(self.folder)["status"] if (self.folder / "run.json").is_file() else "waiting"
        return status == "finished" or (status == "diverged" and getattr(function_of(self.read_out), "of_diverged", False))


@dataclasses.dataclass(frozen=True)
class Measurement(_Task):
    """What a claim measures by itself at a seed and a scale; kept in a folder of the scale."""

    folder: Path
    claim: str
    seed: int
    scale: Scale

    @property
    def _measure(self) -> Measure:
        measure = claim_called(self.claim).measure
        assert measure is not None  # whoever asks has looked
        return measure

    def _place(self) -> Place:
        return self.folder, self.claim, {"seed": self.seed, "scale": self.scale}, [self._measure]

    @property
    def batch(self) -> str:
        """What one process does."""
        return f"{self.claim} seed {self.seed}"

    def take(self) -> None:
        """Measure and keep the numbers."""
        self.keep(lambda: {label: _plain(of) for label, of in self._measure(self.seed, self.scale).items()})


@dataclasses.dataclass(frozen=True)
class OfModel(_Task):
    """What a claim measures on a checkpoint and a draw of texts; kept in one folder for all of them.

    Args:
        model, revision, config: what the model is loaded by, the identity of its weights, and its fingerprint.
        corpus, text, tokens: what the corpus is made by, the identity of the text, and a hash of rows as the model reads them.
    """

    folder: Path
    claim: str
    seed: int
    model: str
    revision: str
    corpus: str
    text: str
    config: str
    tokens: str

    def _place(self) -> Place:
        read = {"weights": self.revision, "config": self.config, "text": self.text, "tokens": self.tokens}
        return self.folder, self.claim, {"seed": self.seed, **read}, functions_of(self.claim)

    @property
    def batch(self) -> str:
        """What one process does: all claims of one model on one draw."""
        return f"{Path(self.model).name} {self.revision[-8:]} seed {self.seed}"

    def take(self, checkpoint: Checkpoint) -> None:
        """Measure and keep the numbers, or why there are none."""
        self.keep(lambda: {label: _plain(of) for label, of in self._measured(checkpoint).items()})

    def _measured(self, checkpoint: Checkpoint) -> Mapping[str, Mapping[str, float]]:
        how = claim_called(self.claim).checkpoint
        assert how is not None  # whoever asks has looked
        reason = how.not_about(checkpoint) if how.not_about is not None else ""
        if reason:
            raise DoesNotApply(reason)
        if how.measure is not None:
            return how.measure(checkpoint)
        numbers: dict[str, float] = {}
        for function in functions_of(self.claim):
            numbers |= function(checkpoint)
        return {how.label: numbers}


def functions_of(name: str) -> list[Callable[..., Any]]:
    """What measures a claim on a checkpoint: its own function, or its read-outs."""
    claim = claim_called(name)
    assert claim.checkpoint is not None  # whoever asks has looked
    if claim.checkpoint.measure is not None:
        return [claim.checkpoint.measure]
    return [function_of(name_of(name, read_out)) for read_out in claim.read_outs]


def name_of(claim: str, read_out: str | ReadOut) -> str:
    """The name under which a read-out of a claim is kept."""
    return read_out if isinstance(read_out, str) else f"{claim}.{cast(Any, read_out).__name__}"


def function_of(read_out: str) -> Callable[[TrainedModel], Mapping[str, float]]:
    """The function behind a name of :func:`name_of`; raises UnknownNameError where there is no such read-out or claim."""
    claim, dot, _ = read_out.partition(".")
    if not dot:
        return cast(ReadOut, read_outs[read_out])
    own = (candidate for candidate in claim_called(claim).read_outs if not isinstance(candidate, str))
    return next(candidate for candidate in own if name_of(claim, candidate) == read_out)


def version_of(functions: Sequence[Callable[..., object]]) -> str:
    """Of sinklab, and of the metrics that functions declare, where one is not the first."""
    declared: dict[str, Metric] = {
        metric.name: metric for function in functions for metric in getattr(function, "metrics", ()) if metric.version > 1
    }
    return " ".join([__version__, *(f"{name}={metric.version}" for name, metric in sorted(declared.items()))])


def read_numbers(folder: Path, wanted: Sequence[str]) -> dict[str, float]:
    """Numbers of a trained model: how its training ended, and what has been read out of it; what is missing is left out."""
    run = read_run(folder)
    result = run.get("result") or {}
    numbers = {"diverged": float(run["status"] == "diverged")}
    for name in ("held_out_loss", "steps"):
        if result.get(name) is not None and (name == "steps" or run["status"] == "finished"):
            numbers[name] = float(result[name])
    for read_out in wanted:
        cached = Reading(folder, read_out).cached()
        numbers |= {} if cached is None else {key: value for key, value in cached["numbers"].items() if value is not None}
    return numbers


def held_out_text(folder: Path) -> str:
    """The sha256 of the held-out tokens of a training; "" without a training."""
    return str(read_run(folder)["data"]["held_out"]["sha256"]) if (folder / "run.json").is_file() else ""


def train_and_read(
    cells: Mapping[str, Cell],
    read: Iterable[tuple[str, str]],
    measurements: Sequence[Measurement] = (),
    *,
    scale: Scale,
    store: Path,
    cache: Path,
    jobs: int | None,
    retries: int,
    ray: str | None,
    progress: bool,
) -> tuple[SweepPlan, dict[str, str]]:
    """Train the cells that are missing in a store, and take the read-outs and measurements that are.

    Args:
        cells: by name.
        read: names of cells, each with a read-out to take of it.
        store: output directory of ``sinklab reproduce``.

    Returns:
        The plan of the store, and the errors of what failed.

    Raises:
        ConfigurationError, InputError: a training that cannot be, a machine that cannot run it, or a text or directory that
            cannot be used.
        KeyboardInterrupt: after running trainings have stopped with a checkpoint.
    """
    plan = open_store(store / "runs" / scale, cells, cache, ray=ray, progress=progress)
    errors = train_cells(plan, cells, jobs=jobs, retries=retries, ray=ray, progress=progress)
    readings = [Reading(plan.folder / cell, read_out) for cell, read_out in read]
    return plan, errors | run_missing(readings, measurements, logs=store / "logs", cache=cache, jobs=jobs, progress=progress)


@contextlib.contextmanager
def keeping(store: Path) -> Iterator[None]:
    """Around work on a store: what ends it from outside says where that is and how to go on, if there is anything in it."""
    try:
        yield
    except BaseException as stop:
        stored = (path for pattern in ("runs/*/*/run.json", "measured/*/*") for path in store.glob(pattern))
        if from_outside(stop) and any(path.is_file() for path in stored):
            stop.add_note(f"what was trained and measured is kept in {store}: the same command goes on from there")
        raise


def run_missing(
    readings: Sequence[Reading],
    measurements: Sequence[Measurement | OfModel] = (),
    *,
    logs: Path,
    cache: Path,
    jobs: int | None,
    progress: bool,
) -> dict[str, str]:
    """Take what is missing, several processes at a time: one for a batch of models, for a measurement, for a checkpoint.

    Returns the errors of those that failed: by ``read-outs N``, by claim and seed, and by checkpoint and seed.
    """
    jobs = jobs or torch.cuda.device_count() or os.cpu_count() or 1
    missing: dict[Path, list[Reading]] = {}
    for reading in dict.fromkeys(readings):
        if reading.readable() and reading.cached() is None:
            missing.setdefault(reading.folder, []).append(reading)
    folders = list(missing)
    size = max(1, min(BATCH, math.ceil(len(folders) / jobs)))
    batches: dict[str, list[Reading | Measurement | OfModel]] = {
        f"read-outs {start // size + 1}": [reading for folder in folders[start : start + size] for reading in missing[folder]]
        for start in range(0, len(folders), size)
    }
    for task in measurements:
        if task.cached() is None:
            batches.setdefault(task.batch, []).append(task)
    if not batches:
        return {}
    commands = {
        name: [
            *("sinklab_claims.reproduce.store", str(cache)),
            json.dumps([[type(task).__name__, dataclasses.asdict(task)] for task in batch], default=str),
        ]
        for name, batch in batches.items()
    }

    def outcome(name: str) -> str | None:
        return "done" if all(task.cached() is not None for task in batches[name]) else None

    with watching(len(commands), 0, wanted=progress) as watch:
        return run_processes(
            commands,
            lambda name: logs / f"{name.replace(' ', '-')}.log",
            outcome,
            jobs=jobs,
            retries=0,
            watch=watch,
            environments={name: {"OMP_NUM_THREADS": "1"} for name in commands},
        )


def _plain(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers for JSON, which has none that are not finite."""
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def _work(cache: Path, batch: str) -> None:
    """Take one batch; the read-outs of a model share what is loaded of it, and so do the claims on a checkpoint."""
    trained, checkpoint, opened = TrainedModel(Path(), cache), None, None
    for kind, fields in json.loads(batch):
        fields["folder"] = Path(fields["folder"])
        if kind == "Measurement":
            Measurement(**fields).take()
        elif kind == "OfModel":
            task = OfModel(**fields)
            draw = task.model, task.corpus, task.seed
            if checkpoint is None or opened != draw:  # mostly a batch is about one; of one model on two texts it is not
                checkpoint, opened = Checkpoint(load_model(task.model), resolve_corpus(task.corpus), task.seed), draw
            print(task.claim, file=sys.stderr, flush=True)
            task.take(checkpoint)
        else:
            reading = Reading(**fields)
            trained = trained if trained.folder == reading.folder else TrainedModel(reading.folder, cache)
            print(f"{reading.folder.name}: {reading.read_out}", file=sys.stderr, flush=True)
            reading.take(trained)


def main(arguments: Sequence[str]) -> None:
    """The process of a batch: the directory of encoded text, and the batch as :func:`run_missing` writes it."""
    cache, batch = arguments
    serve(lambda: _work(Path(cache), batch))


if __name__ == "__main__":
    main(sys.argv[1:])
