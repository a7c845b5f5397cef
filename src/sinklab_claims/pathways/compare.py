"""The comparison of pathways: operations that let a head do nothing, trained and measured alike, in a table and a record."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from sinklab.errors import ConfigurationError, InputError, ResultError
from sinklab.results.blocks import markdown
from sinklab.results.environment import environment
from sinklab.results.file import clear_partial
from sinklab.results.folder import FolderLock, check_place, require_no_less
from sinklab.results.metric import extremes_of
from sinklab.results.run import Progress, Result, new_run_id, silent
from sinklab.results.table import make_table, read_run, read_table, write_json, write_table, write_text
from sinklab.studies.trigger.problem import TriggerProblem
from sinklab.training.process import default_cache
from sinklab_claims.contract.claim import BASES, SCALES, Base, Scale, bases_at, is_natural
from sinklab_claims.contract.scales import base_config
from sinklab_claims.pathways.columns import COLUMNS, GROUPS, READ_OUTS
from sinklab_claims.pathways.judging import PROTOCOL, judged
from sinklab_claims.pathways.operations import DEFAULT, Pathway, matched_widths, pathways_of
from sinklab_claims.pathways.runs import (
    SELECTION_SEEDS,
    Design,
    Measurements,
    Numbers,
    foreseen,
    train_and_read,
    trigger_numbers,
)
from sinklab_claims.pathways.show import DEFINITION, show, show_numbers
from sinklab_claims.reproduce.store import keeping

__all__ = ["design_of", "own_base", "run_pathways"]

PROBE = "pathways"

TRIGGER = "trigger"
"""Folder of the trigger task inside the output directory."""


def own_base(scale: Scale) -> Base:
    """What rows begin with by default: no BOS where the scale has that, since BOS is a place to rest whatever the operation."""
    return bases_at(scale, ("no-bos", "bos"))[0]


def design_of(
    operations: Sequence[Mapping[str, object]], seeds: Sequence[int], scale: Scale, base: Base | None, rate: float | None = None
) -> Design:
    """What is compared, checked; nothing is trained. Raises as :func:`~sinklab_claims.pathways.pathways.pathways`."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"pathways: seeds {list(seeds)}; expected one or more, and none twice")
    if scale not in SCALES:
        raise ConfigurationError(f"there is no scale {scale!r}; scales: {', '.join(SCALES)}")
    if base is not None and base not in BASES[scale]:
        raise ConfigurationError(f"pathways: scale {scale} has the base {', '.join(BASES[scale])}, and `base` is {base!r}")
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise ConfigurationError(f"`rate` is {rate:g}; expected a learning rate over that of the scale, such as 0.5")
    if both := sorted(set(seeds) & set(SELECTION_SEEDS[scale])):
        raise ConfigurationError(
            f"pathways: seed {both[0]} is one on which learning rates are chosen; evaluate on others than "
            f"{', '.join(map(str, SELECTION_SEEDS[scale]))}"
        )
    pathways, base = pathways_of(operations), base or own_base(scale)
    return Design(pathways, matched_widths(pathways, base_config(scale, base)), scale, base, seeds, rate)


def run_pathways(
    operations: Sequence[Mapping[str, object]] = DEFAULT,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    scale: Scale = "tiny",
    base: Base | None = None,
    rate: float | None = None,
    out: Path = Path("sinklab-pathways"),
    store: Path = Path("sinklab-claims"),
    problem: TriggerProblem | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    retries: int = 2,
    cache: Path | None = None,
    progress: bool = True,
    stages: Progress = silent,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Compare operations, or go on with a comparison: :func:`~sinklab_claims.pathways.pathways.pathways` with all options read.

    The trigger task (``problem``, by default the published one) goes on in ``out/trigger``. ``out`` gets its files
    when all is done.

    Args:
        progress: show trainings on a terminal's stderr, lines elsewhere.
        stages: called with the rest: a stage, what is done of it, and its total.
        say: called once, before anything is trained, with how much it is.
    """
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"`jobs` must be at least 1, got {jobs}")
    design, problem = design_of(operations, seeds, scale, base, rate), problem or TriggerProblem()
    given, (out, store) = out, (path.expanduser().absolute() for path in (out, store))
    cache = (cache or (store / "cache" if ray is not None else default_cache())).expanduser().absolute()
    check_place(out)
    with keeping(store), FolderLock(out):
        _require_own(out, design)
        if say is not None:
            say(foreseen(design))
        measured = train_and_read(design, store=store, cache=cache, jobs=jobs, retries=retries, ray=ray, progress=progress)
        numbers = measured.numbers
        of_trigger, cannot = trigger_numbers(design, problem, out / TRIGGER, stages)
        for seed, by_label in of_trigger.items():
            for label, values in by_label.items():
                numbers[seed].setdefault(label, {}).update(values)
        config = base_config(scale, design.base)

        labels = [pathway.label for pathway in design.pathways]
        natural = is_natural(scale)
        rows = judged(labels, numbers, measured.choices, cannot=cannot, one_rate=rate is not None, natural=natural)
        run_id = new_run_id()
        table = _long_table(design.pathways, numbers, config.data.corpus, run_id)
        summary = {"rows": [row.to_dict() for row in rows], "cannot": cannot, "errors": measured.errors}
        record = _record(summary, design, measured, problem, run_id)
        (out / "run.json").unlink(missing_ok=True)  # of an earlier comparison, beside whose files new ones would lie
        write_table(table, out / "table.parquet")
        write_text(markdown(show_numbers(summary)), out / "pathways.md")
        write_json(record | {"extremes": extremes_of(table)}, out / "run.json")  # last: it is whole
        return Result(summary, table, record, given, shows=show)


def _require_own(out: Path, design: Design) -> None:
    """Refuse a folder of something else, of another scale, base or rate, or of more: the files in it are written again."""
    clear_partial(out)
    stored = read_run(out) if (out / "run.json").is_file() else {}
    own = (out / TRIGGER).is_dir() or (stored.get("kind") == "pathways" if stored else _was_begun(out))
    if out.is_dir() and any(out.iterdir()) and not own:
        raise InputError(
            f"output directory {out} holds something else than a comparison of pathways; choose another with `out`"
        )
    for name, own in {"scale": design.scale, "base": design.base, "rate": design.rate}.items():
        if stored and stored.get(name) != own:
            raise InputError(
                f"output directory {out} holds the comparison with {name} {stored.get(name)}, and this one has {own}; choose "
                "another with `out`"
            )
    of = {"operations": list(stored.get("operations", ())), "seeds": stored.get("seeds", [])}
    require_no_less(out, of, {"operations": [pathway.label for pathway in design.pathways], "seeds": design.seeds})


def _was_begun(out: Path) -> bool:
    """Whether a comparison was ended while it wrote its files, of which the table is the first."""
    try:
        return set(read_table(out / "table.parquet")["probe"]) == {PROBE}
    except (InputError, ResultError):
        return False


def _long_table(
    pathways: Sequence[Pathway],
    numbers: Numbers,
    corpus: str,
    run_id: str,
) -> pd.DataFrame:
    """The long table; what the seeds of the selection gave is in the record."""
    metrics = {column.name: column.metric for column in COLUMNS}
    corpora = {column.name: "trigger_task" if column.source == "trigger" else corpus for column in COLUMNS}
    names = {pathway.label: pathway.fields["name"] for pathway in pathways}
    rows = [
        {
            **{"model": label, "operation": names[label], "corpus": corpora[name]},
            **{"metric": metrics[name], "seed": seed, "value": value, "count": 1},
        }
        for seed, by_label in numbers.items()
        for label, values in by_label.items()
        for name, value in values.items()
    ]

    return make_table(rows, run_id=run_id, probe=PROBE)


def _record(
    summary: Mapping[str, object], design: Design, measured: Measurements, problem: TriggerProblem, run_id: str
) -> dict[str, object]:
    base = base_config(design.scale, design.base)
    return {
        "kind": "pathways",
        "protocol": PROTOCOL,
        "run_id": run_id,
        "scale": design.scale,
        "base": design.base,
        "seeds": list(design.seeds),
        "selection_seeds": list(SELECTION_SEEDS[design.scale]) if design.rate is None else [],
        "rate": design.rate,
        "definition": dict(DEFINITION),
        "operations": {
            pathway.label: {
                "operation": pathway.operation(base.model.max_position_embeddings),
                "no_op": pathway.published.no_op if pathway.published else "",
                "source": pathway.published.source if pathway.published else "settings as asked for",
                "intermediate_size": design.widths[pathway.label],
            }
            for pathway in design.pathways
        },
        "rates": {label: choice.to_dict() for label, choice in measured.choices.items()},
        "columns": {
            column.name: {"source": column.source, "metric": column.of, "unit": column.metric.unit, "text": column.metric.text}
            for column in COLUMNS
        },
        "trainings": {source: {"what": GROUPS[source], "read_outs": list(READ_OUTS[source])} for source in measured.cells},
        "cells": measured.cells,
        "rows": summary["rows"],
        "cannot_do_the_trigger_task": summary["cannot"],
        "trigger_setting": dataclasses.asdict(problem),
        "config": base.model_dump(mode="json"),
        "held_out_sha256": measured.held_out_sha256,
        "environment": environment(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "errors": summary["errors"],
    }
