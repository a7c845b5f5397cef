"""Adding to a kept comparison of pathways the columns that it lacks, because they are newer than it is.

``python -m sinklab.studies.pathways.added results/tiny/pathways --store store`` trains again what a missing column is read
from, with the seeds and the learning rates of the comparison, reads that column, and judges the comparison again. A training
whose loss is not the one in the table is another training: then nothing is added.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.errors import ConfigurationError, InputError, ResultError
from sinklab.jobs.grid import Cell
from sinklab.jobs.scale import is_natural
from sinklab.results.run import new_run_id
from sinklab.results.table import append, make_table, read_run, read_table, write_table
from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.choosing import Choice
from sinklab.studies.pathways.columns import COLUMNS, READ_OUTS, Column, Source
from sinklab.studies.pathways.judging import PROTOCOL
from sinklab.studies.pathways.operations import Pathway, pathways_of
from sinklab.studies.pathways.runs import Asked, evaluation_cells, factors_of
from sinklab.studies.reproduce import work
from sinklab.training.process import default_cache

__all__ = ["LOSS", "Cells", "add_columns", "asked_of_record", "control_of", "missing_columns", "same_loss", "train_and_read"]

SAME_LOSS = 1e-4
"""Nats by which the loss of a training may differ from the one in the table: another order of sums, and no other training."""

Cells = Mapping[Source, Mapping[tuple[str, int], Cell]]
"""Training to label and seed to its cell."""

LOSS: Mapping[Source, str] = {"chosen": "held_out_loss", "scale": "scale_rate_loss"}
"""Column of the table that the loss of a training must equal; others have none, and nothing is added to them."""


def missing_columns(table: pd.DataFrame, *, one_rate: bool = False, natural: bool = False) -> dict[Source, list[Column]]:
    """Columns that are read from trained models and that a table does not have, by the training that they are read from.

    Args:
        one_rate: a comparison at one given rate, which has no other trainings.
        natural: its text is natural.
    """
    there = set(table["metric"])
    lacking: dict[Source, list[Column]] = {}
    for column in COLUMNS:
        if (one_rate and column.source != "chosen") or (column.natural and not natural):
            continue
        if column.name not in there and column.source in LOSS and READ_OUTS[column.source]:
            lacking.setdefault(column.source, []).append(column)
    return lacking


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
    asked, factors = asked_of_record(record, folder)
    rows: list[dict[str, Any]] = []
    for source, columns in lacking.items():
        cells = evaluation_cells(asked, factors)[source]
        if {label: {str(seed): cells[label, seed].name for seed in asked.seeds} for label, _ in cells} != record["cells"][
            source
        ]:
            raise InputError(f"{folder}: its trainings are not those of today's code; make another with sinklab pathways")
        place = train_and_read(folder, asked, {source: cells}, store=store, jobs=jobs, progress=progress)
        losses = table[table["metric"] == LOSS[source]].set_index(["model", "seed"])["value"]
        for (label, seed), cell in cells.items():
            found = work.read_numbers(place / cell.name, READ_OUTS[source])
            if not same_loss(found["held_out_loss"], float(losses.get((label, seed), math.nan))):
                raise ResultError(
                    f"{folder}: {label} with seed {seed} ends at a loss of {found['held_out_loss']:.6f} nats here, and at "
                    f"{float(losses.get((label, seed), math.nan)):.6f} in the table: another training, so nothing is added"
                )
            rows += [
                {"model": label, "metric": column.metric, "seed": seed, "value": found[column.of], "count": 1}
                for column in columns
                if column.of in found
            ]
    operation = {str(model): name for model, name in table[["model", "operation"]].itertuples(index=False)}
    corpus = record["config"]["data"]["corpus"]
    new = make_table(
        [{**row, "operation": operation[row["model"]], "corpus": corpus} for row in rows], run_id=new_run_id(), probe="pathways"
    )
    write_table(append([table, new]), folder / "table.parquet")
    judge_again(folder)
    return [column.name for columns in lacking.values() for column in columns]


def asked_of_record(record: Mapping[str, Any], folder: Path) -> tuple[Asked, dict[str, float]]:
    """What a kept comparison compared, and the learning rates that it chose, by label.

    Raises:
        InputError: it was made by another protocol, or does not tell the settings of an operation.
    """
    if record.get("protocol") != PROTOCOL:
        raise InputError(f"{folder}: made by protocol {record.get('protocol', 1)}, and today's is {PROTOCOL}")
    published = {pathway.label: pathway for pathway in pathways_of()}
    compared = [published.get(label) or _with_settings(label, of, folder) for label, of in record["operations"].items()]
    choices = {label: Choice.of_dict(choice) for label, choice in record["rates"].items()}
    asked = Asked(
        compared,
        {label: of["intermediate_size"] for label, of in record["operations"].items()},
        record["scale"],
        record["base"],
        record["seeds"],
        record.get("rate"),
    )
    factors = factors_of(asked, choices)
    return dataclasses.replace(asked, dtype=_dtype_of(record, asked, factors)), factors


def _with_settings(label: str, of: Mapping[str, Any], folder: Path) -> Pathway:
    """The row of an operation that is not compared by default, from the settings in a record.

    Raises:
        InputError: they are not those that its label names.
    """
    fields = of.get("operation")
    try:
        _, pathway = pathways_of([fields or {}])
    except (ConfigurationError, KeyError, ValueError) as error:
        raise InputError(f"{folder}: {label} has settings of its own, which the record does not tell") from error
    if pathway.label != label:
        raise InputError(f"{folder}: {label} is recorded with the settings of {pathway.label}")
    return pathway


def control_of(asked: Asked) -> Source:
    """The trainings that every comparison of its kind has of every operation, and by which those of today are recognised."""
    return "scale" if asked.rate is None else "chosen"


def _dtype_of(record: Mapping[str, Any], asked: Asked, factors: Mapping[str, float]) -> str | None:
    """In which its models were trained, on whatever machine, as their names tell; ``None`` where no such name is known."""
    label, seed = asked.pathways[0].label, asked.seeds[0]
    source = control_of(asked)
    name = record["cells"].get(source, {}).get(label, {}).get(str(seed))
    for dtype in ("bfloat16", "float32"):
        first = dataclasses.replace(asked, seeds=[seed], dtype=dtype)
        if evaluation_cells(first, factors)[source][label, seed].name == name:
            return dtype
    return None


def train_and_read(
    folder: Path, asked: Asked, cells: Cells, *, store: Path, jobs: int | None, progress: bool, also: Collection[Cell] = ()
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
    wanted = [cell for of_source in cells.values() for cell in of_source.values()]
    plan, errors = work.train_and_read(
        {cell.name: cell for cell in (*wanted, *also)},
        [(cell.name, name) for source, of_source in cells.items() for cell in of_source.values() for name in READ_OUTS[source]],
        scale=asked.scale,
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


def same_loss(loss: float, kept: float) -> bool:
    """Whether two trainings that ended at these losses are one, made twice."""
    return abs(loss - kept) <= SAME_LOSS or (math.isnan(loss) and math.isnan(kept))


def main(arguments: list[str] | None = None) -> None:
    """Add what a comparison lacks, and print the names of its new columns."""
    parser = argparse.ArgumentParser(
        prog="python -m sinklab.studies.pathways.added", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="of a comparison, with run.json and table.parquet")
    parser.add_argument("--store", type=Path, default=Path("sinklab-claims"), help="where trained models are kept")
    parser.add_argument("--jobs", type=int, help="processes at a time; by default one per GPU or core")
    given = parser.parse_args(arguments)
    try:
        names = add_columns(given.folder, store=given.store.absolute(), jobs=given.jobs)
    except (InputError, ResultError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"added: {', '.join(names) or 'nothing, every column is there'}")


if __name__ == "__main__":
    main()
