"""More operations for a kept comparison of pathways: trained on its seeds, beside the softmax that it has.

``python -m sinklab.studies.pathways.more_operations results/tiny/pathways --operations relu,softpick --store store`` finds each
new operation a learning rate of its own, as the comparison did (of a comparison at one given rate: takes that), trains and
reads it on all its seeds, times it in turns with softmax, and judges all operations again. One training of softmax that the
comparison has is made again as a control: if its loss is another, this processor rounds otherwise, or today's code trains
other models, and nothing is added; operations can be compared with softmax on other seeds then, and that be joined
(:mod:`sinklab.studies.pathways.joined`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, ResultError, SinklabError
from sinklab.registry import operations as registry
from sinklab.registry import split_specs
from sinklab.results.run import Progress, new_run_id, silent
from sinklab.results.table import append, read_run, write_json, write_table
from sinklab.studies.pathways.added import train_and_read as train_control
from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.benchmark import long_table, operations_of
from sinklab.studies.pathways.cost import costs
from sinklab.studies.pathways.kept import StoredComparison, parser_of, seeds_of_record, whole
from sinklab.studies.pathways.matching import matched_widths
from sinklab.studies.pathways.operations import all_settings, pathways_of
from sinklab.studies.pathways.runs import Design, Measurements, join_numbers, train_and_read, trigger_numbers
from sinklab.studies.reproduce.scales import base_config
from sinklab.studies.trigger.problem import TriggerProblem
from sinklab.training.process import default_cache

__all__ = ["add_operations"]

JOIN = (
    "compare the new operations with softmax on other seeds (sinklab pathways --seeds) and join that "
    "(python -m sinklab.studies.pathways.joined)"
)
"""What can be done on a machine that trains another softmax with the same seed."""


def add_operations(
    folder: Path,
    operations: Sequence[Mapping[str, object]],
    *,
    store: Path,
    jobs: int | None = None,
    progress: bool = True,
    stages: Progress = silent,
) -> list[str]:
    """Train, read and time operations that a kept comparison lacks, and judge it again with them.

    Args:
        folder: with ``run.json`` and ``table.parquet``.
        operations: ``{"name": …, setting: value}``; those that are there are left as they are.
        store: output directory of ``sinklab reproduce``, whose trained models are used and added to; the trigger task goes on
            in its folder ``trigger``.

    Returns:
        Labels of the operations that are new; without any nothing is trained or written.

    Raises:
        UnknownNameError: no such operation.
        ConfigurationError: a setting that cannot be, or an operation whose parameters cannot be matched.
        InputError: a comparison by another protocol, one that lacks columns, or one that was joined from two.
        ResultError: trainings that failed, or a control that ends at another loss.
    """
    stored = whole(folder)
    if len(set(map(tuple, seeds_of_record(stored.record).values()))) > 1:
        raise InputError(
            f"{folder} was joined from comparisons of different machines, so that no machine has softmax with all its "
            f"seeds; {JOIN}"
        )
    reference, *named = pathways_of(operations)
    there = [all_settings(pathway) for pathway in stored.design.pathways]
    new = [pathway for pathway in named if all_settings(pathway) not in there]
    if not new:
        return []
    config = base_config(stored.design.scale, stored.design.base)
    widths = matched_widths([reference, *new], config)
    _, control = stored.control
    place = train_control(folder, stored.design, {}, store=store, jobs=jobs, progress=progress, also=[control])
    stored.require_control(place, f"; if it is the processor, {JOIN}")
    design = dataclasses.replace(stored.design, pathways=new, widths=widths)
    measured = train_and_read(design, store=store, cache=default_cache(), jobs=jobs, retries=2, ray=None, progress=progress)
    if measured.errors:
        raise ResultError(f"{folder}: nothing is added, since trainings failed: {'; '.join(measured.errors)}")
    problem = TriggerProblem(**stored.record["trigger_setting"])
    of_trigger, cannot = trigger_numbers(design, problem, store / "trigger", stages)
    join_numbers(measured.numbers, of_trigger)
    times = costs([reference, *new], config, widths=widths, progress=stages)
    times.pop(reference.label)  # one by definition, and there already
    run_id = new_run_id()
    rows = long_table(new, measured.numbers, times, stored.record["config"]["data"]["corpus"], run_id)
    write_table(append([stored.table, rows]), folder / "table.parquet")
    write_json(_record(stored, design, measured, cannot, run_id), folder / "run.json")
    judge_again(folder)
    return [pathway.label for pathway in new]


def _record(
    stored: StoredComparison, design: Design, measured: Measurements, cannot: Mapping[str, str], run_id: str
) -> dict[str, Any]:
    """The record with the new operations and their trainings, and what these were made and timed with."""
    record = stored.record
    cells = {source: {**of, **measured.cells.get(source, {})} for source, of in record["cells"].items()}
    return {
        **record,
        "operations": {**record["operations"], **operations_of(design)},
        "rates": {**record["rates"], **{label: choice.to_dict() for label, choice in measured.choices.items()}},
        "cells": cells,
        "cannot_do_the_trigger_task": {**record["cannot_do_the_trigger_task"], **cannot},
        "added": stored.added("operations", [pathway.label for pathway in design.pathways], run_id),
    }


def main(arguments: list[str] | None = None) -> None:
    """Add operations to a comparison, and print which are new."""
    parser = parser_of("more_operations", __doc__)
    parser.add_argument("--operations", required=True, help="as of sinklab pathways: relu,sigmoid:normalize=true")
    options = parser.parse_args(arguments)
    try:
        chosen = [registry.read(name) for name in split_specs(options.operations)]
        names = add_operations(options.folder, chosen, store=options.store.absolute(), jobs=options.jobs)
    except SinklabError as error:
        parser.exit(2, f"error: {error}\n")
    there = len(read_run(options.folder)["operations"])
    print(f"added: {', '.join(names) or 'nothing, every operation is there'}; {there} in all")


if __name__ == "__main__":
    main()
