"""More seeds for a kept comparison of pathways: trained at the learning rates that it has chosen, and judged with the others.

``python -m sinklab.studies.pathways.more_seeds results/tiny-bos/pathways --seeds 4..7 --store store`` trains every operation
at its own rate and at the scale's (of a comparison at one given rate: at that), reads all columns, and runs the trigger task.
No rate is chosen again, and times and the column of ALiBi models stay as they are. One training of softmax that the comparison
has is made again as a control: if its loss is another, today's code trains other models, and nothing is added.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.errors import ConfigurationError, InputError, ResultError
from sinklab.jobs.scale import is_natural
from sinklab.results.environment import environment
from sinklab.results.run import Progress, new_run_id, silent
from sinklab.results.table import append, read_run, read_table, write_json, write_table
from sinklab.studies.arguments import parse_seeds
from sinklab.studies.pathways.added import LOSS, Cells, asked_of_record, control_of, missing_columns, same_loss, train_and_read
from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.benchmark import long_table
from sinklab.studies.pathways.choosing import check_apart
from sinklab.studies.pathways.columns import READ_OUTS
from sinklab.studies.pathways.operations import REFERENCE
from sinklab.studies.pathways.runs import combined, evaluation_cells, trigger_numbers
from sinklab.studies.reproduce import work
from sinklab.studies.trigger.problem import TriggerProblem

__all__ = ["add_seeds"]


def add_seeds(
    folder: Path,
    seeds: Sequence[int],
    *,
    store: Path,
    jobs: int | None = None,
    progress: bool = True,
    stages: Progress = silent,
) -> None:
    """Train and read a kept comparison on more seeds, and judge it again over all of them.

    Args:
        folder: with ``run.json`` and ``table.parquet``.
        seeds: none that the comparison has, and none of the selection.
        store: output directory of ``sinklab reproduce``, whose trained models are used and added to; the trigger task goes on
            in its folder ``trigger``.

    Raises:
        ConfigurationError: a seed on which rates are chosen, or one twice.
        InputError: a seed that is there, a comparison by another protocol, or one that lacks columns.
        ResultError: trainings that failed, or a control that ends at another loss.
    """
    record, table = read_run(folder), read_table(folder / "table.parquet")
    asked, factors = asked_of_record(record, folder)
    _require_new(folder, seeds, asked.seeds)
    check_apart(seeds, asked.scale)
    missing = missing_columns(table, one_rate=asked.rate is not None, natural=is_natural(asked.scale))
    if lacking := [column.name for columns in missing.values() for column in columns]:
        raise InputError(
            f"{folder} lacks the columns {', '.join(lacking)}; add them first (python -m sinklab.studies.pathways.added)"
        )
    by_source: Cells = {
        source: cells
        for source, cells in evaluation_cells(dataclasses.replace(asked, seeds=list(seeds)), factors).items()
        if source in LOSS
    }
    source = control_of(asked)
    control = evaluation_cells(asked, factors)[source][REFERENCE, asked.seeds[0]]
    place = train_and_read(folder, asked, by_source, store=store, jobs=jobs, progress=progress, also=[control])
    _require_control(folder, table, place / control.name, LOSS[source], asked.seeds[0])
    raw = {
        source: {key: work.read_numbers(place / cell.name, READ_OUTS[source]) for key, cell in cells.items()}
        for source, cells in by_source.items()
    }
    numbers = combined(raw, seeds, natural=is_natural(asked.scale))
    problem = TriggerProblem(**record["trigger_setting"])
    of_trigger, _ = trigger_numbers(dataclasses.replace(asked, seeds=list(seeds)), problem, store / "trigger", stages)
    for seed, by_label in of_trigger.items():
        for label, values in by_label.items():
            numbers[seed].setdefault(label, {}).update(values)
    run_id = new_run_id()
    new = long_table(asked.pathways, numbers, {}, record["config"]["data"]["corpus"], run_id)
    write_table(append([table, new]), folder / "table.parquet")
    write_json(_record(record, seeds, by_source, run_id), folder / "run.json")
    judge_again(folder)


def _require_new(folder: Path, seeds: Sequence[int], there: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"seeds {list(seeds)}; expected one or more, and none twice")
    if shared := sorted(set(seeds) & set(there)):
        raise InputError(f"{folder} has the seeds {', '.join(map(str, shared))} already; it has {', '.join(map(str, there))}")


def _require_control(folder: Path, table: pd.DataFrame, training: Path, loss: str, seed: int) -> None:
    """Refuse where softmax with a seed of the comparison ends at another loss than it did."""
    found = work.read_numbers(training, ()).get("held_out_loss", math.nan)
    of_it = (table["metric"] == loss) & (table["model"] == REFERENCE) & (table["seed"] == seed)
    kept = float(table.loc[of_it, "value"].iloc[0])
    if not same_loss(found, kept):
        raise ResultError(
            f"{folder}: {REFERENCE} with seed {seed} ends at a loss of {found:.6f} nats here, and at {kept:.6f} in the table: "
            "today's trainings are others, so no seed is added"
        )


def _record(record: Mapping[str, Any], seeds: Sequence[int], by_source: Cells, run_id: str) -> dict[str, Any]:
    """The record with the new seeds and their trainings, and what these were made with."""
    cells = {source: {label: dict(of_label) for label, of_label in of.items()} for source, of in record["cells"].items()}
    for source, of_source in by_source.items():
        for (label, seed), cell in of_source.items():
            cells[source].setdefault(label, {})[str(seed)] = cell.name
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    more = {"seeds": list(seeds), "run_id": run_id, "environment": environment(), "created": created}
    added = [*record.get("added", []), more]
    return {**record, "seeds": [*record["seeds"], *seeds], "cells": cells, "added": added}


def main(arguments: list[str] | None = None) -> None:
    """Add seeds to a comparison, and say how many it has then."""
    parser = argparse.ArgumentParser(
        prog="python -m sinklab.studies.pathways.more_seeds", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="of a comparison, with run.json and table.parquet")
    parser.add_argument("--seeds", required=True, help="4..7 (both ends included), or a list such as 4,5")
    parser.add_argument("--store", type=Path, default=Path("sinklab-claims"), help="where trained models are kept")
    parser.add_argument("--jobs", type=int, help="processes at a time; by default one per GPU or core")
    given = parser.parse_args(arguments)
    try:
        add_seeds(given.folder, parse_seeds(given.seeds), store=given.store.absolute(), jobs=given.jobs)
    except (ConfigurationError, InputError, ResultError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{given.folder}: {len(read_run(given.folder)['seeds'])} seeds")


if __name__ == "__main__":
    main()
