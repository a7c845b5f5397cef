"""Numbers of a store: read-outs of trained models and measurements of a seed, taken in processes of their own and kept.

Every number is an entry of a store (:mod:`sinklab.results.store`) under the weights, the settings and the version of sinklab
that it was taken with, so that a run that was interrupted, or a claim or seed that was added, costs what is missing.
"""

from __future__ import annotations

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
from sinklab.jobs.processes import Watch, run_processes, serve
from sinklab.models.loading import load_model
from sinklab.registry import read_outs
from sinklab.results.folder import from_outside
from sinklab.results.metric import Metric
from sinklab.results.progress import Progress, bars, silent
from sinklab.results.store import Store
from sinklab.results.table import read_run
from sinklab.results.version import __version__
from sinklab_claims.contract.claim import ReadOut, Scale
from sinklab_claims.contract.trained import Checkpoint, TrainedModel
from sinklab_claims.reproduce.cells import open_store, train_cells
from sinklab_claims.reproduce.claims import claim_called

__all__ = ["Task", "keeping", "measurement", "name_of", "read_numbers", "reading", "run_missing", "train_and_read"]

BATCH = 12
"""Models read in one process: enough that starting it, five seconds where it is no fork, is the smaller part."""

Opened = TrainedModel | Checkpoint | None


@dataclasses.dataclass(frozen=True)
class Task:
    """Something that is measured once and kept in a store, whose entry has its name and its settings.

    Args:
        folder: of the store.
        name: of a read-out as :func:`name_of` has it, or of a claim that measures by itself.
        settings: what the numbers belong to; with the ``seed``, and the ``scale`` of what trains or draws by itself.
        batch: what one process does, in words.
        run: folder of the trained model that a read-out is of.
        model, corpus: what a claim is measured on, where that is a checkpoint.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    batch: str
    run: Path | None = None
    model: str = ""
    corpus: str = ""

    @property
    def seed(self) -> int:
        """Of what a claim measures."""
        return int(self.settings["seed"])

    def functions(self) -> list[Callable[..., Any]]:
        """What measures: a read-out, the function of a claim, or on a checkpoint that or its read-outs."""
        if self.run is not None:
            return [_function_of(self.name)]
        claim = claim_called(self.name)
        how = claim.checkpoint if self.model else None
        if how is not None and how.measure is None:
            return [_function_of(name_of(self.name, read_out)) for read_out in claim.read_outs]
        measure = claim.measure if how is None else how.measure
        assert measure is not None  # whoever asks has looked
        return [measure]

    def cached(self) -> dict[str, Any] | None:
        """What was measured before: ``numbers``, ``seconds``, and of a checkpoint ``reason`` where the claim does not apply."""
        entry = Store(self.folder).get(self.name, self.settings, version_of(self.functions()))
        return None if entry is None else cast(dict[str, Any], entry.record)

    def take(self, opened: Opened = None) -> None:
        """Measure and keep the numbers, or why a checkpoint has none."""
        started, record = time.monotonic(), dict[str, Any](numbers={})
        try:
            record["numbers"] = self._measured(opened)
        except (DoesNotApply, UnsupportedModelError) as error:
            if not self.model:
                raise
            record["reason"] = str(error)
        record["seconds"] = round(time.monotonic() - started, 2)
        Store(self.folder).put(self.name, self.settings, version_of(self.functions()), record)

    def _measured(self, opened: Opened) -> dict[str, Any]:
        functions = self.functions()
        if self.run is not None:
            return _plain(functions[0](opened))
        if not self.model:
            return {label: _plain(of) for label, of in functions[0](self.seed, self.settings["scale"]).items()}
        how = claim_called(self.name).checkpoint
        assert how is not None, "whoever asks has looked"
        assert isinstance(opened, Checkpoint)
        if how.not_about is not None and (reason := how.not_about(opened)):
            raise DoesNotApply(reason)
        if how.measure is not None:
            return {label: _plain(of) for label, of in how.measure(opened).items()}
        return {how.label: {name: value for function in functions for name, value in _plain(function(opened)).items()}}

    def open(self, cache: Path) -> Opened:
        """The model that it is measured on."""
        if self.run is not None:
            return TrainedModel(self.run, cache)
        return Checkpoint(load_model(self.model), resolve_corpus(self.corpus), self.seed) if self.model else None


def reading(run: Path, read_out: str) -> Task | None:
    """A read-out of the trained model in a run folder; ``None`` where there is nothing to read.

    Of a run that diverged there is only where the function has a true ``of_diverged``.
    """
    record = read_run(run) if (run / "run.json").is_file() else {}
    status = record.get("status")
    if status != "finished" and not (status == "diverged" and getattr(_function_of(read_out), "of_diverged", False)):
        return None
    settings = {"run": record["run_id"], "weights": TrainedModel(run, run).weights}
    return Task(run / "read_outs", read_out, settings, "", run)


def measurement(store: Path, claim: str, seed: int, scale: Scale) -> Task:
    """What a claim measures by itself at a seed and a scale."""
    return Task(store / "measured" / scale, claim, {"seed": seed, "scale": scale}, f"{claim} seed {seed}")


def name_of(claim: str, read_out: str | ReadOut) -> str:
    """The name under which a read-out of a claim is kept: a registered name, or ``claim.function``."""
    return read_out if isinstance(read_out, str) else f"{claim}.{cast(Any, read_out).__name__}"


def _function_of(read_out: str) -> Callable[..., Mapping[str, float]]:
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


def read_numbers(run: Path, wanted: Sequence[str]) -> dict[str, float]:
    """Numbers of a trained model: how its training ended, and what has been read out of it; what is missing is left out."""
    record = read_run(run)
    result = record.get("result") or {}
    numbers = {"diverged": float(record["status"] == "diverged")}
    for name in ("held_out_loss", "steps"):
        if result.get(name) is not None and (name == "steps" or record["status"] == "finished"):
            numbers[name] = float(result[name])
    for read_out in wanted:
        task = reading(run, read_out)
        cached = None if task is None else task.cached()
        numbers |= {} if cached is None else {key: value for key, value in cached["numbers"].items() if value is not None}
    return numbers


def train_and_read(
    cells: Mapping[str, Cell],
    read: Iterable[tuple[str, str]],
    measurements: Sequence[Task] = (),
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
    tasks = [task for cell, read_out in dict.fromkeys(read) if (task := reading(plan.folder / cell, read_out)) is not None]
    with bars() if progress else contextlib.nullcontext(silent) as shown:
        return plan, errors | run_missing([*tasks, *measurements], logs=store / "logs", cache=cache, jobs=jobs, progress=shown)


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


class _Kept(Watch):
    """Tells how many of the tasks are kept, within a batch too."""

    def __init__(self, tasks: Sequence[Task], progress: Progress) -> None:
        super().__init__(len(tasks), 0)
        self.paths = [Store(task.folder).paths(task.name, task.settings)[0] for task in tasks]
        for path in self.paths:
            path.unlink(missing_ok=True)  # of another version, and to be written anew
        self.progress = progress
        self.tick(lambda name: "")

    def tick(self, newest: Callable[[str], str]) -> None:
        self.progress("measuring", sum(path.is_file() for path in self.paths), len(self.paths))


def run_missing(
    tasks: Sequence[Task], *, logs: Path, cache: Path, jobs: int | None, progress: Progress = silent
) -> dict[str, str]:
    """Take what is missing, several processes at a time: one for a batch of models, for a measurement, for a checkpoint.

    Returns the errors of those that failed: by ``read-outs N``, by claim and seed, and by checkpoint and seed.
    """
    jobs = jobs or torch.cuda.device_count() or os.cpu_count() or 1
    missing = [task for task in tasks if task.cached() is None]
    runs = list(dict.fromkeys(task.run for task in missing if task.run is not None))
    size = max(1, min(BATCH, math.ceil(len(runs) / jobs)))
    batches: dict[str, list[Task]] = {}
    for task in missing:
        batches.setdefault(task.batch or f"read-outs {runs.index(cast(Path, task.run)) // size + 1}", []).append(task)
    if not batches:
        return {}
    commands = {
        name: [__name__, str(cache), json.dumps([dataclasses.asdict(task) for task in batch], default=str)]
        for name, batch in batches.items()
    }
    return run_processes(
        commands,
        lambda name: logs / f"{name.replace(' ', '-')}.log",
        lambda name: "done" if all(task.cached() is not None for task in batches[name]) else None,
        jobs=jobs,
        retries=0,
        watch=_Kept(missing, progress),
        environments={name: {"OMP_NUM_THREADS": "1"} for name in commands},
    )


def _plain(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers for JSON, which has none that are not finite."""
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def _work(cache: Path, batch: str) -> None:
    """Take one batch; the read-outs of a model share what is loaded of it, and so do the claims on a checkpoint."""
    opened: Opened = None
    of: tuple[object, ...] | None = None
    for fields in json.loads(batch):
        fields |= {name: Path(fields[name]) for name in ("folder", "run") if fields[name] is not None}
        task = Task(**fields)
        source = (task.run, task.model, task.corpus, task.settings.get("seed"))
        if source != of:
            opened, of = task.open(cache), source
        print(f"{task.run.name}: {task.name}" if task.run is not None else task.name, file=sys.stderr, flush=True)
        task.take(opened)


def main(arguments: Sequence[str]) -> None:
    """The process of a batch: the directory of encoded text, and the batch as :func:`run_missing` writes it."""
    cache, batch = arguments
    serve(lambda: _work(Path(cache), batch))


if __name__ == "__main__":
    main(sys.argv[1:])
