"""Adding to a kept comparison of pathways the columns that it lacks, because they are newer than it is.

``python -m sinklab.studies.pathways.added results/tiny/pathways --store store`` trains again what a missing column is read
from, with the seeds and the learning rates of the comparison, reads that column, and judges the comparison again. A training
whose loss is not the one in the table is another training: then nothing is added.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, ResultError
from sinklab.jobs.grid import Cell
from sinklab.jobs.scale import is_natural
from sinklab.results.run import new_run_id
from sinklab.results.table import append, make_table, read_run, read_table, write_table
from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.columns import READ_OUTS, Source
from sinklab.studies.pathways.kept import LOSS, design_of_record, missing_columns, parser_of, same_loss, seeds_of_record
from sinklab.studies.pathways.runs import Design, evaluation_cells
from sinklab.studies.reproduce import work
from sinklab.training.process import default_cache

__all__ = ["Cells", "add_columns", "train_and_read"]

Cells = Mapping[Source, Mapping[tuple[str, int], Cell]]
"""Training to label and seed to its cell."""


def add_columns(folder: Path, *, store: Path, jobs: int | None = None, progress: bool = True) -> list[str]:
    """Train, read and add what a kept comparison lacks, and judge it again.

    Args:
        folder: with ``run.json`` and ``table.parquet``.
        store: output directory of ``sinklab reproduce``, whose trained models are used and added to.

    Returns:
        Names of the columns that are new; without any nothing is trained or written.

    Raises:
        InputError: a comparison by another protocol, or of trainings that are not those of today's code.
        ResultError: trainings that failed, or whose losses are not those of the comparison.
    """
    record, table = read_run(folder), read_table(folder / "table.parquet")
    lacking = missing_columns(table, one_rate=record.get("rate") is not None, natural=is_natural(record["scale"]))
    if not lacking:
        return []
    design, factors = design_of_record(record, folder)
    seeds = seeds_of_record(record)
    rows: list[dict[str, Any]] = []
    for source, columns in lacking.items():
        cells = {key: cell for key, cell in evaluation_cells(design, factors)[source].items() if key[1] in seeds[key[0]]}
        named: dict[str, dict[str, str]] = {}
        for (label, seed), cell in cells.items():
            named.setdefault(label, {})[str(seed)] = cell.name
        if named != record["cells"][source]:
            raise InputError(f"{folder}: its trainings are not those of today's code; make another with sinklab pathways")
        place = train_and_read(folder, design, {source: cells}, store=store, jobs=jobs, progress=progress)
        losses = table[table["metric"] == LOSS[source]].set_index(["model", "seed"])["value"]
        for (label, seed), cell in cells.items():
            numbers = work.read_numbers(place / cell.name, READ_OUTS[source])
            if not same_loss(numbers["held_out_loss"], float(losses.get((label, seed), math.nan))):
                raise ResultError(
                    f"{folder}: {label} with seed {seed} ends at a loss of {numbers['held_out_loss']:.6f} nats here, and at "
                    f"{float(losses.get((label, seed), math.nan)):.6f} in the table: another training, so nothing is added"
                )
            rows += [
                {"model": label, "metric": column.metric, "seed": seed, "value": numbers[column.of], "count": 1}
                for column in columns
                if column.of in numbers
            ]
    operation = {str(model): name for model, name in table[["model", "operation"]].itertuples(index=False)}
    corpus = record["config"]["data"]["corpus"]
    new = make_table(
        [{**row, "operation": operation[row["model"]], "corpus": corpus} for row in rows], run_id=new_run_id(), probe="pathways"
    )
    write_table(append([table, new]), folder / "table.parquet")
    judge_again(folder)
    return [column.name for columns in lacking.values() for column in columns]


def train_and_read(
    folder: Path, design: Design, cells: Cells, *, store: Path, jobs: int | None, progress: bool, also: Collection[Cell] = ()
) -> Path:
    """Train what the store lacks and read the columns of each training.

    Args:
        folder: of the comparison, for the message.
        also: trained too, and not read.

    Returns:
        Where the trainings lie, each in a folder of its name.

    Raises:
        ResultError: trainings or read-outs that failed.
    """
    cells_to_read = [cell for of_source in cells.values() for cell in of_source.values()]
    plan, errors = work.train_and_read(
        {cell.name: cell for cell in (*cells_to_read, *also)},
        [(cell.name, name) for source, of_source in cells.items() for cell in of_source.values() for name in READ_OUTS[source]],
        scale=design.scale,
        store=store,
        cache=default_cache(),
        jobs=jobs,
        retries=2,
        ray=None,
        progress=progress,
    )
    if errors:
        listed = "; ".join(f"{name}: {why}" for name, why in errors.items())
        raise ResultError(f"{folder}: nothing is added, since trainings failed: {listed}")
    return plan.folder


def main(arguments: list[str] | None = None) -> None:
    """Add what a comparison lacks, and print the names of its new columns."""
    parser = parser_of("added", __doc__)
    options = parser.parse_args(arguments)
    try:
        names = add_columns(options.folder, store=options.store.absolute(), jobs=options.jobs)
    except (InputError, ResultError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"added: {', '.join(names) or 'nothing, every column is there'}")


if __name__ == "__main__":
    main()
