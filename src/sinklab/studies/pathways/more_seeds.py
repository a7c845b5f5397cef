"""More seeds for a kept comparison of pathways: trained at the learning rates that it has chosen, and judged with the others.

``python -m sinklab.studies.pathways.more_seeds results/tiny-bos/pathways --seeds 4..7 --store store`` trains every operation
at its own rate and at the scale's (of a comparison at one given rate: at that), reads all columns, and runs the trigger task.
No rate is chosen again, and times and the column of ALiBi models stay as they are. One training of softmax that the comparison
has is made again as a control: if its loss is another, this processor rounds otherwise, or today's code trains other models,
and nothing is added. ``--other-processor`` adds them all the same: all operations of a seed are then of one processor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.errors import ConfigurationError, InputError, ResultError
from sinklab.jobs.scale import is_natural
from sinklab.results.naming import counted
from sinklab.results.run import Progress, new_run_id, silent
from sinklab.results.table import append, read_run, write_json, write_table
from sinklab.studies.arguments import parse_seeds
from sinklab.studies.pathways.added import Cells, train_and_read
from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.benchmark import long_table
from sinklab.studies.pathways.choosing import check_apart
from sinklab.studies.pathways.columns import READ_OUTS
from sinklab.studies.pathways.kept import LOSS, StoredComparison, parser_of, whole
from sinklab.studies.pathways.runs import combined, evaluation_cells, join_numbers, trigger_numbers
from sinklab.studies.reproduce import work
from sinklab.studies.trigger.problem import TriggerProblem

__all__ = ["add_seeds"]


def add_seeds(
    folder: Path,
    seeds: Sequence[int],
    *,
    store: Path,
    other_processor: bool = False,
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
        other_processor: add them where the control ends at another loss, too. Comparisons are within a seed, all of whose
            operations are trained here; that the code is the same is then not checked.

    Raises:
        ConfigurationError: a seed on which rates are chosen, or one twice.
        InputError: a seed that is there, a comparison by another protocol, or one that lacks columns.
        ResultError: trainings that failed, or a control that ends at another loss.
    """
    stored = whole(folder)
    _require_new(folder, seeds, stored.design.seeds)
    check_apart(seeds, stored.design.scale)
    design = dataclasses.replace(stored.design, seeds=list(seeds))
    by_source: Cells = {source: cells for source, cells in evaluation_cells(design, stored.factors).items() if source in LOSS}
    _, control = stored.control
    place = train_and_read(folder, design, by_source, store=store, jobs=jobs, progress=progress, also=[control])
    if not other_processor:
        stored.require_control(place, "; --other-processor adds them all the same, if it is that")
    raw = {
        source: {key: work.read_numbers(place / cell.name, READ_OUTS[source]) for key, cell in cells.items()}
        for source, cells in by_source.items()
    }
    numbers = combined(raw, seeds, natural=is_natural(design.scale))
    problem = TriggerProblem(**stored.record["trigger_setting"])
    of_trigger, _ = trigger_numbers(design, problem, store / "trigger", stages)
    join_numbers(numbers, of_trigger)
    run_id = new_run_id()
    new = long_table(design.pathways, numbers, {}, stored.record["config"]["data"]["corpus"], run_id)
    write_table(append([stored.table, new]), folder / "table.parquet")
    here, there = stored.losses_of_control(place)
    control_losses = {"here": here, "kept": there}
    write_json(_record(stored, seeds, by_source, run_id, control_losses), folder / "run.json")
    judge_again(folder)


def _require_new(folder: Path, seeds: Sequence[int], there: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"seeds {list(seeds)}; expected one or more, and none twice")
    if shared := sorted(set(seeds) & set(there)):
        raise InputError(f"{folder} has the seeds {', '.join(map(str, shared))} already; it has {', '.join(map(str, there))}")


def _record(
    stored: StoredComparison, seeds: Sequence[int], by_source: Cells, run_id: str, control: Mapping[str, float]
) -> dict[str, Any]:
    """The record with the new seeds and their trainings, and what these were made with."""
    record = stored.record
    cells = {source: {label: dict(of_label) for label, of_label in of.items()} for source, of in record["cells"].items()}
    for source, of_source in by_source.items():
        for (label, seed), cell in of_source.items():
            cells[source].setdefault(label, {})[str(seed)] = cell.name
    added = stored.added("seeds", seeds, run_id, control=control)
    return {**record, "seeds": [*record["seeds"], *seeds], "cells": cells, "added": added}


def main(arguments: list[str] | None = None) -> None:
    """Add seeds to a comparison, and say how many it has then."""
    parser = parser_of("more_seeds", __doc__)
    parser.add_argument("--seeds", required=True, help="4..7 (both ends included), or a list such as 4,5")
    parser.add_argument("--other-processor", action="store_true", help="add them where the control ends at another loss, too")
    options = parser.parse_args(arguments)
    try:
        add_seeds(
            options.folder,
            parse_seeds(options.seeds),
            store=options.store.absolute(),
            other_processor=options.other_processor,
            jobs=options.jobs,
        )
    except (ConfigurationError, InputError, ResultError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{options.folder}: {counted(len(read_run(options.folder)['seeds']), 'seed')}")


if __name__ == "__main__":
    main()
