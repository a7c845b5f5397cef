"""Trainings of claims: variants as configurations, each in a folder of a store, and how they are run."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.errors import ConfigurationError, InputError, SinklabError
from sinklab.jobs.cell import PLAN, SHARED, SweepPlan, read_plan
from sinklab.jobs.driver import check_machine, prepare_texts, run_waiting
from sinklab.jobs.grid import Cell, short_label
from sinklab.jobs.ray_cluster import require_cluster
from sinklab.results.folder import FolderLock
from sinklab.results.run import new_run_id
from sinklab.training.config import PretrainingConfig
from sinklab.training.process import chosen_dtype
from sinklab.training.token_cache import hash_key
from sinklab_claims.contract.claim import Base, Changes, Scale, Times, Variant, bases_at
from sinklab_claims.contract.scales import SECONDS_OF_A_TRAINING, base_config

__all__ = ["configure", "make_cells", "open_store", "resolved_changes", "train_cells"]


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
        base: of those that the scale has; by default its first.

    Raises:
        ConfigurationError: as :func:`configure`, or variants that start after each other in a circle.
    """
    of_scale, by_label = base_config(scale, base), {variant.label: variant for variant in variants}
    other = None if base == bases_at(scale)[0] else base
    cells: dict[tuple[str, int], Cell] = {}

    def cell_of(label: str, seed: int, above: tuple[str, ...] = ()) -> Cell:
        if label in above:
            raise ConfigurationError(f"variants start after each other in a circle: {', '.join((*above, label))}")
        if (label, seed) not in cells:
            variant = by_label[label]
            config = _of_seed(configure(of_scale, variant), seed, scale)
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
        check_machine(new)
        if new and ray is not None:
            require_cluster(ray)  # before texts are encoded, which may take long
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


def _of_seed(config: PretrainingConfig, seed: int, scale: Scale) -> PretrainingConfig:
    """The same with a seed, in the dtype of this machine by name, so that a store that moves does not mix precisions."""
    fields = config.model_dump()
    fields["training"]["seed"] = fields["data"]["seed"] = seed
    if scale in SECONDS_OF_A_TRAINING and config.training.dtype == "auto":
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
