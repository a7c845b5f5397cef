"""The store of claims: variants as configurations that are trained once, and numbers that are taken of them, each kept.

Every number is an entry of a store (:mod:`sinklab.results.store`) under the weights, the settings and the version of sinklab
that it was taken with, so that a run that was interrupted, or a claim or seed that was added, costs what is missing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from sinklab.corpora import resolve_corpus
from sinklab.errors import ConfigurationError, DoesNotApply, InputError, SinklabError, UnsupportedModelError
from sinklab.jobs.cell import PLAN, SHARED, SweepPlan, read_plan
from sinklab.jobs.driver import check_machine, prepare_texts, run_waiting
from sinklab.jobs.grid import Cell, short_label
from sinklab.jobs.processes import Watch, run_processes, serve
from sinklab.models.loading import load_model
from sinklab.registry import read_outs
from sinklab.results.folder import FolderLock, from_outside
from sinklab.results.metric import Metric
from sinklab.results.progress import Progress, silent
from sinklab.results.run import new_run_id
from sinklab.results.store import Store
from sinklab.results.table import read_run
from sinklab.results.version import __version__
from sinklab.training.config import PretrainingConfig
from sinklab.training.process import chosen_dtype
from sinklab.training.tokenizer import hash_key
from sinklab_claims.contract.claim import BASELINE, Base, Changes, ReadOut, Scale, Times, Variant, base_config
from sinklab_claims.contract.trained import STREAMED, Checkpoint, TrainedModel
from sinklab_claims.reproduce.claims import claim_called

NAME_LENGTH = 80
"""Characters of a cell's name before its hash."""

PER_TRAINING = {"seed", "random_positions", "fixed_position", "fixed_token", "unique_fraction", "held_out_rows"}
"""Fields of the data that make other rows of one text, and no other text."""


def configure(base: PretrainingConfig, variant: Variant) -> PretrainingConfig:
    """The configuration of a variant.

    Raises:
        ConfigurationError: a field that does not exist, a value that it does not take, or one that decides the seeds.
    """
    fields = base.model_dump()
    for path, value in resolved_changes(base, variant).items():
        if path in ("training.seed", "data.seed"):
            raise ConfigurationError(f"variant {variant.label!r} sets {path}, which belongs to the seeds")
        above, _, last = path.rpartition(".")
        _get(fields, above)[last] = copy.deepcopy(value)
    try:
        return PretrainingConfig.parse(fields)
    except SinklabError as error:
        raise ConfigurationError(f"variant {variant.label!r}: {error}") from error


def resolved_changes(base: PretrainingConfig, variant: Variant) -> dict[str, object]:
    """What a variant changes at one scale: dotted field to value; what leaves a field as it is, is left out."""
    given: Changes = variant.changes(base) if callable(variant.changes) else variant.changes
    fields = base.model_dump()
    changed = {}
    for path, value in given.items():
        before = _get(fields, path)
        if isinstance(value, Times):  # a factor keeps whole numbers whole, so that steps stay steps
            value = round(before * value.factor) if isinstance(before, int) else before * value.factor
        if before != value:
            changed[path] = value
    return changed


def make_cells(
    variants: Iterable[Variant], scale: Scale, seeds: Sequence[int], base: Base | None = None
) -> dict[tuple[str, int], Cell]:
    """Label and seed to the cell that is trained for it; equal configurations give cells of one name.

    Args:
        variants: of one claim, so that labels are unique.

    Raises:
        ConfigurationError: as :func:`configure`, or variants that start after each other in a circle.
    """
    of_scale, by_label = base_config(scale, base), {variant.label: variant for variant in variants}
    other = None if base == "bos" else base
    cells: dict[tuple[str, int], Cell] = {}

    def cell_of(label: str, seed: int, above: tuple[str, ...] = ()) -> Cell:
        if label in above:
            raise ConfigurationError(f"variants start after each other in a circle: {', '.join((*above, label))}")
        if (label, seed) not in cells:
            variant = by_label[label]
            config = _of_seed(configure(of_scale, variant), seed)
            before = None if variant.after is None else cell_of(variant.after, seed, (*above, label)).name
            settings = resolved_changes(of_scale, variant)
            cells[label, seed] = Cell(_name(settings, seed, config, before, other), settings, config, before)
        return cells[label, seed]

    for seed in seeds:  # the first seed of all variants first: a look at the whole before it is finished
        for label in by_label:
            cell_of(label, seed)
    return cells


def open_store(folder: Path, cells: Mapping[str, Cell], cache: Path, *, ray: str | None = None, progress: bool) -> SweepPlan:
    """The store in ``folder`` with these cells in its plan; cells that it has already stay, whoever asked for them.

    Several processes may add to one store and train in it at the same time: the plan is written under a lock and only grows,
    and a cell is trained by one of them while the others wait for it.

    Raises:
        ConfigurationError, InputError: a cell that this machine cannot run, a cluster ``ray`` that does not answer, a text
            that cannot be used, or one that has changed since cells of the store read it.
    """
    with FolderLock(folder, patience=math.inf):
        earlier = read_plan(folder) if (folder / PLAN).is_file() else None
        known = {} if earlier is None else earlier.cells
        new = {name: cell for name, cell in cells.items() if name not in known}
        check_machine(new, ray)
        texts = prepare_texts(new, cache, progress)
        if earlier is not None:
            _require_text_of_begun(earlier, new, texts)
            texts = earlier.texts | texts
        plan = SweepPlan(folder, earlier.sweep_id if earlier else new_run_id(), known | new, texts, cache, shared=True)
        if new or earlier is None:
            plan.write(recipe=SHARED)
    return plan


def _require_text_of_begun(earlier: SweepPlan, new: Mapping[str, Cell], texts: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse cells to which a configuration of the data gives another text than it gave to those that have begun."""
    begun = {name: cell for name, cell in earlier.cells.items() if name in earlier.texts and (earlier.folder / name).exists()}
    readers = {source: name for name, cell in begun.items() for source in _sources(cell.config)}
    for name, cell in new.items():
        for source in _sources(cell.config):
            other = readers.get(source)
            if other is not None and any(earlier.texts[other][part] != texts[name][part] for part in source[0]):
                raise InputError(
                    f"the corpus {cell.config.data.corpus!r} gives another text than {other} in {earlier.folder} has read, and "
                    "trainings that are compared must read the same; bring the old text back, or begin in another directory"
                )


def _sources(config: PretrainingConfig) -> list[tuple[tuple[str, ...], str, int | None]]:
    """Parts of what a cell reads, and what decides their text: cells with equal sources read the same."""
    data = config.data.model_dump_json(exclude=PER_TRAINING)
    # As much of the held-out documents is read as the held-out rows take, and the context is a cell's own.
    tokens = config.data.held_out_rows * config.model.max_position_embeddings
    return [(("train", "tokenizer"), data, None), (("held_out",), data, tokens)]


def train_cells(
    plan: SweepPlan, names: Iterable[str], *, jobs: int | None, retries: int, ray: str | None, progress: bool
) -> dict[str, str]:
    """Train the cells that have not ended, those that start from others' weights last; the errors of those that failed."""
    unique = list(dict.fromkeys(names))
    errors: dict[str, str] = {}

    def depth(name: str) -> int:
        before = plan.cells[name].init_from
        return 0 if before is None else 1 + depth(before)

    for _, of_depth in itertools.groupby(sorted(unique, key=depth), depth):
        stage = list(of_depth)
        ready = [name for name in stage if plan.cells[name].init_from not in errors]
        errors |= {name: f"{plan.cells[name].init_from}, from which it starts, failed" for name in stage if name not in ready}
        if ready and any(plan.outcome(name) is None for name in ready):
            errors |= run_waiting(plan, ready, jobs=jobs, retries=retries, ray=ray, progress=progress)
    return errors


def _of_seed(config: PretrainingConfig, seed: int) -> PretrainingConfig:
    """The same with a seed, in the dtype of this machine by name, so that a store that moves does not mix precisions."""
    fields = config.model_dump()
    fields["training"]["seed"] = fields["data"]["seed"] = seed
    if config.training.dtype == "auto":
        fields["training"]["dtype"] = chosen_dtype(config)
    return PretrainingConfig.parse(fields)


def _name(settings: Mapping[str, Any], seed: int, config: PretrainingConfig, before: str | None, other: Base | None) -> str:
    """Folder of a cell: what is other than in the first base of the scale, and a hash of all that decides its numbers."""
    words = [f"{short_label(path)}={json.dumps(value)}" for path, value in settings.items()]
    text = re.sub(r"[^\w.+=-]+", "-", ",".join(words)).strip("-")[:NAME_LENGTH] or "baseline"
    text = text if other is None else f"{other}-{text}"
    key = hash_key([config.model_dump(mode="json"), before])[:10]
    return f"{text}-seed{seed}-{key}"


def _get(fields: Mapping[str, Any], path: str) -> Any:
    inner: Any = fields
    for part in path.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            raise ConfigurationError(f"there is no field {path!r} in the configuration of a scale")
        inner = inner[part]
    return inner


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
        model, corpus, length: what a claim is measured on, where that is a checkpoint, and tokens of its long texts.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    batch: str
    run: Path | None = None
    model: str = ""
    corpus: str = ""
    length: int = STREAMED

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
        started, processor, record = time.monotonic(), time.process_time(), dict[str, Any](numbers={})
        try:
            record["numbers"] = self._measured(opened)
        except (DoesNotApply, UnsupportedModelError) as error:
            if not self.model:
                raise
            record["reason"] = str(error)
        record["seconds"] = round(time.monotonic() - started, 2)
        record["processor_seconds"] = round(time.process_time() - processor, 2)
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
        return {BASELINE: {name: value for function in functions for name, value in _plain(function(opened)).items()}}

    def open(self, cache: Path) -> Opened:
        """The model that it is measured on."""
        if self.run is not None:
            return TrainedModel(self.run, cache)
        if not self.model:
            return None
        return Checkpoint(load_model(self.model), resolve_corpus(self.corpus), self.seed, self.length)


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
        self.shown = progress
        self.tick()

    def tick(self) -> None:
        self.shown("measuring", sum(path.is_file() for path in self.paths), len(self.paths))


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
