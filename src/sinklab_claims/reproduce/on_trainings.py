"""Claims on trainings: what several need is trained once, read out and judged over seeds; a table and a record for each."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import ConfigurationError, InputError, ResultError
from sinklab.jobs.cell import SweepPlan
from sinklab.jobs.grid import Cell
from sinklab.results.environment import environment
from sinklab.results.folder import FolderLock, require_no_less
from sinklab.results.metric import Metric, declared
from sinklab.results.progress import bars, duration, silent
from sinklab.results.run import Result, new_run_id
from sinklab.results.sections import to_json
from sinklab.results.table import make_table, read_run, write_json, write_table
from sinklab.training.process import default_cache
from sinklab_claims.contract.claim import (
    SCALES,
    SECONDS_OF_A_TRAINING,
    SECONDS_ON_A_GPU,
    Base,
    Claim,
    Cost,
    Scale,
    base_config,
    folder_name,
)
from sinklab_claims.contract.effect import Numbers
from sinklab_claims.reproduce.claims import claim_called
from sinklab_claims.reproduce.store import (
    keeping,
    make_cells,
    measurement,
    name_of,
    open_store,
    read_numbers,
    reading,
    resolved_changes,
    run_missing,
    train_cells,
)
from sinklab_claims.verdict.records import ClaimFound, answer
from sinklab_claims.verdict.rule import Conclusion, judge

if TYPE_CHECKING:
    import pandas as pd

OF_A_CLAIM = Metric("of_a_claim", "number", "Stands for a number that the claim of another package declares nowhere.")

SECONDS_OF_A_MEASUREMENT: Mapping[Cost, float] = {"seconds": 10.0, "minutes": 35.0, "hours": 900.0}
"""Of one core, in round numbers: means of a seed of the kept claims that train their own models or none, by their cost."""


@dataclasses.dataclass(frozen=True)
class _Request:
    """A claim with the base it is run on and the cells it needs; none at a scale that cannot express it."""

    name: str
    claim: Claim
    scale: Scale
    base: Base
    cells: dict[tuple[str, int], Cell]

    @property
    def runnable(self) -> bool:
        return self.scale in self.claim.costs

    @property
    def folder(self) -> str:
        """Where its result lies, below the output directory."""
        return f"{folder_name(self.scale, self.base, self.claim.bases[0])}/{self.name}"

    @property
    def read_outs(self) -> list[str]:
        return [name_of(self.name, read_out) for read_out in self.claim.read_outs]


def reproduce(
    names: Sequence[str],
    *,
    scale: Scale = "tiny",
    base: Base | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    out: Path = Path("sinklab-claims"),
    jobs: int | None = None,
    ray: str | None = None,
    retries: int = 2,
    cache: Path | None = None,
    progress: bool = True,
) -> list[Result]:
    """Run claims, or go on with them, and judge them; what has been trained, read out or measured before is kept.

    ``out`` gets ``runs/SCALE``, a store of trained models that all claims share and that only grows, and for every claim
    ``SCALE/CLAIM`` with ``table.parquet`` and ``run.json``; on another base than its own, ``SCALE-BASE/CLAIM``. Several
    processes may run claims that are not the same there, and share what they train. Arguments and errors: as in
    :func:`sinklab_claims.reproduce.reproduce.reproduce`.

    Returns:
        One for each claim: :func:`answer` is its summary; without a folder if it cannot be run at this scale.
    """
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"`jobs` must be at least 1, got {jobs}")
    out = out.expanduser().absolute()
    cache = (cache or (out / "cache" if ray is not None else default_cache())).expanduser().absolute()
    requests = _requests(names, scale, seeds, base)
    runnable = [request for request in requests if request.runnable]
    cells = {cell.name: cell for request in runnable for cell in request.cells.values()}
    read = [(cell.name, read_out) for request in runnable for cell in request.cells.values() for read_out in request.read_outs]
    measured = [measurement(out, of.name, seed, scale) for of in runnable if of.claim.measure is not None for seed in seeds]
    with keeping(out), contextlib.ExitStack() as locks:
        for request in sorted(runnable, key=lambda request: request.name):
            locks.enter_context(FolderLock(out / request.folder))
            require_no_less(out / request.folder, {"seeds": kept_of(out / request.folder)["seeds"]}, {"seeds": seeds})
        plan = open_store(out / "runs" / scale, cells, cache, ray=ray, progress=progress)
        errors = train_cells(plan, cells, jobs=jobs, retries=retries, ray=ray, progress=progress)
        tasks = [reading(plan.folder / cell, read_out) for cell, read_out in dict.fromkeys(read)]
        with bars() if progress else contextlib.nullcontext(silent) as shown:
            there = [task for task in tasks if task is not None]
            errors |= run_missing([*there, *measured], logs=out / "logs", cache=cache, jobs=jobs, progress=shown)
        return [_conclude(request, plan, seeds, out, errors) for request in requests]


def foreseen(names: Sequence[str], scale: Scale, seeds: Sequence[int], base: Base | None = None) -> str:
    """What claims take together if nothing of it is there yet, in a sentence: a claim that takes minutes is one of many."""
    requests = _requests(names, scale, seeds, base)
    trainings = len({cell.name for request in requests for cell in request.cells.values()})
    costs = [request.claim.costs[scale] for request in requests if request.claim.measure is not None and request.runnable]
    seconds = trainings * SECONDS_OF_A_TRAINING[scale]
    seconds += len(seeds) * sum(SECONDS_OF_A_MEASUREMENT.get(cost, 0.0) for cost in costs)
    on_gpu, time = SECONDS_ON_A_GPU.get(scale), f", in all {duration(seconds)} of one core" if seconds >= 60 else ""
    if time and trainings and on_gpu is not None:
        gpu = duration(trainings * on_gpu)
        time = f", in all {gpu} of one data-centre GPU; without a GPU {duration(seconds)} of one core"
    counts = f"claims: {len(requests)}, trainings: {trainings}, measurements: {len(seeds) * len(costs)}"
    return f"{counts}{time}; what is there already is not done again"


def kept_of(folder: Path) -> dict[str, Any]:
    """Seeds, models, their texts and looks of the result in a folder; empty where none can be read."""
    try:
        record = read_run(folder)
    except (InputError, ResultError):
        return {"seeds": [], "models": [], "texts": [], "looks": 1}
    models = record.get("models", ())
    texts = [model["text"] for model in models]
    found = {"seeds": record.get("seeds", []), "models": [model["name"] for model in models], "texts": texts}
    return {**found, "looks": record.get("looks", 1)}


def _requests(names: Sequence[str], scale: Scale, seeds: Sequence[int], base: Base | None = None) -> list[_Request]:
    if not names or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(
            f"reproduce: {len(names)} claims and seeds {list(seeds)}; expected one or more, and no seed twice"
        )
    if scale not in SCALES:
        raise ConfigurationError(f"there is no scale {scale!r}; scales: {', '.join(SCALES)}")
    requests = []
    for name in dict.fromkeys(names):
        claim = claim_called(name)
        if base is not None and base not in claim.bases:
            raise ConfigurationError(f"claim {name!r} is run on {', '.join(claim.bases)}, and `base` is {base!r}")
        own = base or claim.bases[0]
        cells = make_cells(claim.variants, scale, seeds, own) if scale in claim.costs else {}
        requests.append(_Request(name, claim, scale, own, cells))
    return requests


def _conclude(request: _Request, plan: SweepPlan, seeds: Sequence[int], out: Path, errors: Mapping[str, str]) -> Result:
    """Judge a claim by what there is, and write it down."""
    claim, run_id = request.claim, new_run_id()
    if not request.runnable:
        reason = (
            f"the claim can be run at {', '.join(claim.costs)} only"
            if claim.costs
            else "it is measured on models as they are: --model"
        )
        none = _found(request, Conclusion("not tested at this scale", (), (), reason), (), 0.0, run_id, [])
        return Result(answer(none), table_of((), run_id), {"kind": "claim", "claim": request.name}, None)
    numbers, seconds = _numbers(request, plan, seeds, out)
    judgement = judge(claim.parts, claim.presupposes, numbers)
    own = {cell.name for cell in request.cells.values()}
    failed = [
        f"{name}: {why}" for name, why in errors.items() if name in own or name.startswith((f"{request.name} ", "read-outs "))
    ]
    known = {
        label: (cell.config.model.operation["name"], cell.config.data.corpus) for (label, _), cell in request.cells.items()
    }
    rows = (
        (dict(zip(("operation", "corpus"), known.get(label, (None, None)), strict=True), model=label), seed, values)
        for seed, by_label in numbers.items()
        for label, values in by_label.items()
    )
    found = _found(request, judgement, seeds, seconds, run_id, failed)
    return written(found, table_of(rows, run_id), out / request.folder)


def _numbers(request: _Request, plan: SweepPlan, seeds: Sequence[int], out: Path) -> tuple[dict[int, Numbers], float]:
    """Numbers by seed and variant, and the seconds of the runs behind them."""
    numbers: dict[int, dict[str, dict[str, float]]] = {seed: {} for seed in seeds}
    seconds = 0.0
    for (label, seed), cell in request.cells.items():
        if plan.outcome(cell.name) is not None:
            folder = plan.folder / cell.name
            numbers[seed][label] = read_numbers(folder, request.read_outs)
            seconds += read_run(folder).get("wall_seconds") or 0.0
    for seed in seeds if request.claim.measure is not None else ():
        cached = measurement(out, request.name, seed, request.scale).cached()
        if cached is None:
            continue
        clash = numbers[seed].keys() & cached["numbers"].keys()
        if clash:
            raise ConfigurationError(f"claim {request.name!r}: {', '.join(sorted(clash))} is a variant and is measured too")
        for label, values in cached["numbers"].items():
            numbers[seed][label] = {name: value for name, value in values.items() if value is not None}
        seconds += cached["seconds"]
    return dict(numbers), seconds


def _found(
    request: _Request, judgement: Conclusion, seeds: Sequence[int], seconds: float, run_id: str, errors: list[str]
) -> ClaimFound:
    claim, scale, config = request.claim, request.scale, base_config(request.scale, request.base)
    variants = {
        variant.label: {
            "changes": resolved_changes(config, variant),
            "after": variant.after,
            "cells": {str(seed): request.cells[variant.label, seed].name for seed in seeds},
        }
        for variant in (claim.variants if request.cells else ())
    }
    return ClaimFound(
        **about(request.name, claim, judgement, run_id),
        source_base=claim.bases[0] if claim.variants else None,
        scale=scale,
        base=request.base if claim.variants else None,
        cost=claim.costs.get(scale, ""),
        seeds=list(seeds),
        evidence=claim.evidence.get(scale, ""),
        presupposes=[finding.record() for finding in judgement.presupposed],
        conditions=variants,
        read_outs=request.read_outs,
        config=config.model_dump(mode="json") if variants else None,
        seconds=round(seconds, 1),
        errors=errors,
    )


def about(name: str, claim: Claim, judgement: Conclusion, run_id: str) -> dict[str, Any]:
    """What every record of a claim has: its words, the verdict, the parts, and when and where it was made."""
    return {
        "run_id": run_id,
        "claim": name,
        **{field: getattr(claim, field) for field in ("statement", "source", "reference", "published")},
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "parts": [finding.record() for finding in judgement.findings],
        "environment": environment(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def table_of(rows: Iterable[tuple[Mapping[str, Any], int, Mapping[str, float]]], run_id: str) -> pd.DataFrame:
    """The long table of a claim, from what each group of numbers is about, its seed and its metrics.

    A number that the claim of another package declares nowhere has no unit.
    """
    entries = [
        {**of, "metric": declared(name) or OF_A_CLAIM.named(name), "seed": seed, "value": value, "count": 1}
        for of, seed, values in rows
        for name, value in values.items()
    ]
    return make_table(entries, run_id=run_id, probe="claim")


def written(found: ClaimFound, table: pd.DataFrame, folder: Path) -> Result:
    """The result of a claim, in its folder: the table, then the record; on other seeds than the one before, another look."""
    before = kept_of(folder)
    looks = before["looks"] + (before["seeds"] not in ([], found.seeds))
    found = dataclasses.replace(found, looks=looks)
    folder.mkdir(parents=True, exist_ok=True)
    record = to_json(found)
    write_table(table, folder / "table.parquet")
    write_json(record, folder / "run.json")
    return Result(answer(found, folder), table, record, folder)
