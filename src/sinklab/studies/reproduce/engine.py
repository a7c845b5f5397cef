"""reproduce(): claims at one scale over seeds; what they share is trained once, and each gets a table and a verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from rich.console import RenderableType

from sinklab.errors import ConfigurationError, InputError, ResultError
from sinklab.jobs.cell import SweepPlan
from sinklab.jobs.claim import Claim
from sinklab.jobs.effect import Numbers
from sinklab.jobs.grid import Cell
from sinklab.jobs.scale import SCALES, Base, Cost, Scale, bases_at, folder_name
from sinklab.jobs.verdict import Conclusion, judge
from sinklab.results.environment import environment
from sinklab.results.folder import FolderLock, require_no_less
from sinklab.results.metric import FRACTION, Metric, declared, extremes_of
from sinklab.results.progress import duration
from sinklab.results.run import Result, new_run_id
from sinklab.results.table import make_table, read_run, write_json, write_table
from sinklab.studies.reproduce.cells import make_cells, open_store, resolved_changes
from sinklab.studies.reproduce.display import display_parts
from sinklab.studies.reproduce.kept import ClaimAnswer, deciding_part, words_of
from sinklab.studies.reproduce.scales import SECONDS_OF_A_TRAINING, SECONDS_ON_A_GPU, base_config
from sinklab.studies.reproduce.work import Measurement, claim_called, keeping, name_of, read_numbers, train_and_read
from sinklab.training.process import default_cache

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["answer", "foreseen", "plan_runs", "reproduce", "undeclared"]

DIVERGED = Metric(
    "diverged", "fraction", "1 for a training that diverged, else 0; of several the share.", outcome=True, range=FRACTION
)
OF_A_CLAIM = Metric("of_a_claim", "number", "Stands for a number that the claim of another package declares nowhere.")

SECONDS_OF_A_MEASUREMENT: Mapping[Cost, float] = {"seconds": 10.0, "minutes": 35.0, "hours": 900.0}
"""Of one core, in round numbers: means of a seed of the kept claims that train their own models or none, by their cost."""


@dataclasses.dataclass(frozen=True)
class _Request:
    """A claim with the base it is run on and the cells it needs."""

    name: str
    claim: Claim
    scale: Scale
    base: Base
    cells: dict[tuple[str, int], Cell]

    @property
    def runnable(self) -> bool:
        """Whether the scale can express the claim."""
        return self.scale in self.claim.costs

    @property
    def shown_base(self) -> Base | None:
        """The base that its result is about; ``None`` where it trains nothing."""
        return self.base if self.claim.variants else None

    @property
    def folder(self) -> str:
        """Where its result lies, below the output directory."""
        return f"{folder_name(self.scale, self.base, bases_at(self.scale, self.claim.bases)[0])}/{self.name}"

    @property
    def read_outs(self) -> list[str]:
        return [name_of(self.name, read_out) for read_out in self.claim.read_outs]

    def measured(self, seed: int, out: Path) -> Measurement:
        return Measurement(out / "measured" / self.scale, self.name, seed, self.scale)


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
    """Run claims, or go on with them, and judge them.

    ``out`` gets ``runs/SCALE``, a store of trained models that all claims share and that only grows, and for every claim
    ``SCALE/CLAIM`` with ``table.parquet`` and ``run.json``; on another base than its own, ``SCALE-BASE/CLAIM``. What has been
    trained, read out or measured before is kept: a run that was interrupted, claims and seeds that are added cost what is
    missing.

    Args:
        names: from ``sinklab list claims``; at least one.
        base: what the rows of the models begin with; by default for every claim what they do in its source.
        seeds: of initialisation, data and measurements; three or more for a verdict.
        jobs, ray, retries: as in :func:`~sinklab.studies.reproduce.reproduce.reproduce`. Read-outs stay on this machine.
        cache: directory of encoded text; with ``ray`` it is ``out/cache`` by default.
        progress: show bars on a terminal's stderr, lines elsewhere.

    Returns:
        One for each claim: :func:`answer` is its summary; without a folder if it cannot be run at this scale.

    Raises:
        UnknownNameError: no claim of a name.
        ConfigurationError: no claims, seeds twice or none, no such scale, a claim that is not run on the base, or a machine
            that cannot run a cell.
        InputError: a text or a directory that cannot be used, or another process that runs one of the claims there. Claims that
            are not the same may be run by several, which share what they train.
        KeyboardInterrupt: after running trainings have stopped with a checkpoint.
    """
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"`jobs` must be at least 1, got {jobs}")
    out = out.expanduser().absolute()
    cache = (cache or (out / "cache" if ray is not None else default_cache())).expanduser().absolute()
    requests = _requests(names, scale, seeds, base)
    runnable = [request for request in requests if request.runnable]
    cells = {cell.name: cell for request in runnable for cell in request.cells.values()}
    read = [(cell.name, read_out) for request in runnable for cell in request.cells.values() for read_out in request.read_outs]
    measurements = [request.measured(seed, out) for request in runnable if request.claim.measure is not None for seed in seeds]
    with keeping(out), contextlib.ExitStack() as locks:
        for request in sorted(runnable, key=lambda request: request.name):
            locks.enter_context(FolderLock(out / request.folder))
            require_no_less(out / request.folder, kept_of(out / request.folder, "seeds"), {"seeds": seeds})
        plan, errors = train_and_read(
            cells,
            read,
            measurements,
            scale=scale,
            store=out,
            cache=cache,
            jobs=jobs,
            retries=retries,
            ray=ray,
            progress=progress,
        )
        return [_conclude(request, plan, seeds, out, errors) for request in requests]


def foreseen(names: Sequence[str], scale: Scale, seeds: Sequence[int], base: Base | None = None) -> str:
    """What claims take together if nothing of it is there yet, in a sentence: a claim that takes minutes is one of many.

    Raises:
        UnknownNameError, ConfigurationError: as :func:`reproduce`.
    """
    requests = _requests(names, scale, seeds, base)
    trainings = len({cell.name for request in requests for cell in request.cells.values()})
    costs = [request.claim.costs[scale] for request in requests if request.claim.measure is not None and request.runnable]
    measurements, of_one = len(seeds) * len(costs), SECONDS_OF_A_TRAINING.get(scale)
    seconds = 0.0
    if of_one is not None:
        seconds = trainings * of_one + len(seeds) * sum(SECONDS_OF_A_MEASUREMENT.get(cost, 0.0) for cost in costs)
    time = f", in all {duration(seconds)} of one core" if seconds >= 60 else ""
    on_gpu = SECONDS_ON_A_GPU.get(scale)
    if time and trainings and on_gpu is not None:
        time = f", in all {duration(trainings * on_gpu)} of one data-centre GPU; without a GPU {duration(seconds)} of one core"
    return (
        f"claims: {len(requests)}, trainings: {trainings}, measurements: {measurements}{time}; what is there already is not "
        "done again"
    )


def kept_of(folder: Path, *names: Literal["seeds", "models", "texts"]) -> dict[str, list[object]]:
    """What the result in a folder is of, models by their names and beside these their texts; nothing where none can be read."""
    try:
        record = read_run(folder)
    except (InputError, ResultError):
        return {}
    models = record.get("models", ())
    of: dict[str, list[object]] = {
        "seeds": record.get("seeds", []),
        "models": [model["name"] for model in models],
        "texts": [model["text"] for model in models],
    }
    return {name: of[name] for name in names}


def plan_runs(
    names: Sequence[str],
    *,
    scale: Scale,
    base: Base | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    out: Path = Path("sinklab-claims"),
    cache: Path | None = None,
    progress: bool = True,
) -> list[str]:
    """A command for every training that claims still need, for machines where a training takes many processes.

    Encodes the text and writes the plan of the store, trains nothing. Every command is for ``torchrun`` and may be run by any
    scheduler, on as many nodes as it likes, those that start from others' weights after the others. When all have ended,
    :func:`reproduce` with the same arguments reads out and judges.

    Args:
        names, scale, base, seeds, out, cache, progress: as in :func:`reproduce`.

    Raises:
        UnknownNameError, ConfigurationError, InputError: as :func:`reproduce`.
    """
    out = out.expanduser().absolute()
    requests = _requests(names, scale, seeds, base)
    cells = {cell.name: cell for request in requests for cell in request.cells.values()}
    plan = open_store(out / "runs" / scale, cells, (cache or default_cache()).expanduser().absolute(), progress=progress)
    left = [name for name in sorted(cells, key=lambda name: cells[name].init_from is not None) if plan.outcome(name) is None]
    return [f"torchrun -m sinklab.jobs.cell {shlex.quote(str(plan.folder))} {name} --no-driver" for name in left]


def _requests(names: Sequence[str], scale: Scale, seeds: Sequence[int], base: Base | None = None) -> list[_Request]:
    if not names or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(
            f"reproduce: {len(names)} claims and seeds {list(seeds)}; expected one or more, and no seed twice"
        )
    if scale not in SCALES:
        raise ConfigurationError(f"there is no scale {scale!r}; scales: {', '.join(SCALES)}")
    return [_request(name, scale, seeds, base) for name in dict.fromkeys(names)]


def _request(name: str, scale: Scale, seeds: Sequence[int], base: Base | None = None) -> _Request:
    claim = claim_called(name)
    bases = bases_at(scale, claim.bases)
    if base is not None and base not in bases:
        raise ConfigurationError(f"claim {name!r} is run on {', '.join(bases)} at scale {scale}, and `base` is {base!r}")
    base = base or bases[0]
    return _Request(name, claim, scale, base, make_cells(claim.variants, scale, seeds, base) if scale in claim.costs else {})


def _conclude(request: _Request, plan: SweepPlan, seeds: Sequence[int], out: Path, errors: Mapping[str, str]) -> Result:
    """Judge a claim by what there is, and write it down."""
    scale = request.scale
    if not request.runnable:
        where = ", ".join(request.claim.costs)
        reason = f"the claim can be run at {where} only"
        judgement = Conclusion("not tested at this scale", (), (), reason)
        summary = answer(request.name, request.claim.source, scale, judgement, base=request.shown_base)
        return Result(
            dict(summary), _table(request, {}, new_run_id()), {"kind": "claim", "claim": request.name}, None, _display
        )
    numbers, seconds = _numbers(request, plan, seeds, out)
    one_model = scale in request.claim.one_model
    judgement = judge(request.claim.parts, request.claim.presupposes, numbers, one_model=one_model)
    folder = out / request.folder
    folder.mkdir(parents=True, exist_ok=True)
    run_id = new_run_id()
    own = {cell.name for cell in request.cells.values()}
    failed = [
        f"{name}: {why}" for name, why in errors.items() if name in own or name.startswith((f"{request.name} ", "read-outs "))
    ]
    table, record = _table(request, numbers, run_id), _record(request, judgement, seeds, seconds, run_id, failed)
    write_table(table, folder / "table.parquet")
    write_json(record | {"extremes": extremes_of(table)}, folder / "run.json")
    summary = answer(
        request.name, request.claim.source, scale, judgement, base=request.shown_base, seeds=seeds, folder=folder, errors=failed
    )
    return Result(dict(summary), table, record, folder, _display)


def answer(
    name: str,
    source: str,
    scale: str,
    judgement: Conclusion,
    *,
    base: Base | None = None,
    seeds: Sequence[int] = (),
    folder: Path | None = None,
    errors: Sequence[str] = (),
) -> ClaimAnswer:
    """What became of a claim: the verdict with the effect of the part that decides it, and what was found about every part."""
    parts = [finding.to_dict() for finding in judgement.findings]
    deciding = deciding_part({"parts": parts, "verdict": judgement.verdict})
    return {
        "name": name,
        "source": source,
        "scale": scale,
        "base": base,
        "verdict": judgement.verdict,
        "effect": None if deciding is None else deciding["mean"],
        "interval": None if deciding is None else deciding["interval"],
        "unit": None if deciding is None else deciding["unit"],
        "seeds": list(seeds),
        "reason": judgement.reason,
        "parts": parts,
        "folder": None if folder is None else str(folder),
        "errors": list(errors),
    }


def _display(result: Result) -> Iterator[RenderableType]:
    return display_parts(cast(ClaimAnswer, result.summary))  # see answer()


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
        cached = request.measured(seed, out).cached()
        if cached is None:
            continue
        clash = numbers[seed].keys() & cached["numbers"].keys()
        if clash:
            raise ConfigurationError(f"claim {request.name!r}: {', '.join(sorted(clash))} is a variant and is measured too")
        for label, values in cached["numbers"].items():
            numbers[seed][label] = {name: value for name, value in values.items() if value is not None}
        seconds += cached["seconds"]
    return dict(numbers), seconds


def _table(request: _Request, numbers: Mapping[int, Numbers], run_id: str) -> pd.DataFrame:
    operations = {
        label: (cell.config.model.operation["name"], cell.config.data.corpus) for (label, _), cell in request.cells.items()
    }
    rows = [
        {
            "model": label,
            "operation": operations.get(label, (None, None))[0],
            "corpus": operations.get(label, (None, None))[1],
            "metric": declared(metric) or undeclared(metric),
            "seed": seed,
            "value": value,
            "count": 1,
        }
        for seed, by_label in numbers.items()
        for label, values in by_label.items()
        for metric, value in values.items()
    ]
    return make_table(rows, run_id=run_id, probe="claim")


def undeclared(metric: str) -> Metric:
    """Stands for a number that the claim of another package declares nowhere."""
    return OF_A_CLAIM.named(metric)


def _record(
    request: _Request, judgement: Conclusion, seeds: Sequence[int], seconds: float, run_id: str, errors: list[str]
) -> dict[str, object]:
    claim, scale, config = request.claim, request.scale, base_config(request.scale, request.base)
    variants = {
        variant.label: {
            "changes": resolved_changes(config, variant),
            "after": variant.after,
            "cells": {str(seed): request.cells[variant.label, seed].name for seed in seeds},
        }
        for variant in claim.variants
    }
    return {
        "kind": "claim",
        "run_id": run_id,
        "claim": request.name,
        **words_of(claim),
        "scale": scale,
        "base": request.shown_base,
        "cost": claim.costs[scale],
        "seeds": list(seeds),
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "evidence": claim.evidence.get(scale, ""),
        "one_model": claim.one_model.get(scale),
        "parts": [finding.to_dict() for finding in judgement.findings],
        "presupposes": [finding.to_dict() for finding in judgement.presupposed],
        "conditions": variants,
        "read_outs": request.read_outs,
        "config": config.model_dump(mode="json") if variants else None,
        "environment": environment(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "errors": errors,
    }
