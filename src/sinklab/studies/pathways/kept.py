"""A kept comparison of pathways that is to be added to: what it compared, and whether today's code trains the same models."""

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
from sinklab.jobs.grid import Cell
from sinklab.jobs.scale import is_natural
from sinklab.results.environment import environment
from sinklab.results.table import read_run, read_table
from sinklab.studies.pathways.choosing import Choice
from sinklab.studies.pathways.columns import COLUMNS, READ_OUTS, Column, Source
from sinklab.studies.pathways.judging import PROTOCOL
from sinklab.studies.pathways.operations import REFERENCE, Pathway, pathways_of
from sinklab.studies.pathways.runs import Design, evaluation_cells, factors_of
from sinklab.studies.reproduce import work

__all__ = [
    "LOSS",
    "StoredComparison",
    "design_of_record",
    "missing_columns",
    "parser_of",
    "same_loss",
    "seeds_of_record",
    "whole",
]

SAME_LOSS = 1e-4
"""Nats by which the loss of a training may differ from the one in the table: another order of sums, and no other training."""

LOSS: Mapping[Source, str] = {"chosen": "held_out_loss", "scale": "scale_rate_loss"}
"""Column of the table that the loss of a training must equal; others have none, and nothing is added to them."""


@dataclasses.dataclass(frozen=True)
class StoredComparison:
    """A comparison as its folder has it.

    Args:
        design: what it compared.
        factors: label to the learning rate that it chose, over that of the scale.
    """

    folder: Path
    record: Mapping[str, Any]
    table: pd.DataFrame
    design: Design
    factors: Mapping[str, float]

    @property
    def control(self) -> tuple[Source, Cell]:
        """The training of softmax on the first seed by which today's trainings are recognised, and what it is one of."""
        source = control_of(self.design.rate)
        first = dataclasses.replace(self.design, seeds=self.design.seeds[:1])
        return source, evaluation_cells(first, self.factors)[source][REFERENCE, first.seeds[0]]

    def losses_of_control(self, store: Path) -> tuple[float, float]:
        """Nats at which the control in a folder of trainings has ended, and those of the comparison."""
        source, cell = self.control
        here = work.read_numbers(store / cell.name, ()).get("held_out_loss", math.nan)
        of_it = self.table["metric"] == LOSS[source]
        of_it &= (self.table["model"] == REFERENCE) & (self.table["seed"] == self.design.seeds[0])
        return here, float(self.table.loc[of_it, "value"].iloc[0])

    def require_control(self, store: Path, advice: str = "") -> None:
        """Refuse where the control in a folder of trainings has ended at another loss than the comparison's.

        Raises:
            ResultError: it has.
        """
        here, there = self.losses_of_control(store)
        if not same_loss(here, there):
            raise ResultError(
                f"{self.folder}: {REFERENCE} with seed {self.design.seeds[0]} ends at a loss of {here:.6f} nats here, and at "
                f"{there:.6f} in the table: this processor rounds otherwise, or today's code trains other models, so nothing "
                f"is added{advice}"
            )

    def added(self, what: str, values: Sequence[object], run_id: str, **more: object) -> list[dict[str, Any]]:
        """What the record says of all that was added, with what is added now and what it was made with.

        Args:
            what: ``seeds`` or ``operations``, and these.
        """
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = {what: list(values), "run_id": run_id, **more, "environment": environment(), "created": created}
        return [*self.record.get("added", []), made]


def parser_of(module: str, about: str | None, *, trains: bool = True) -> argparse.ArgumentParser:
    """What the commands that add to a comparison are all given: its folder, and where they train the store and processes.

    Args:
        module: last part of the name of the command's module.
        about: its documentation, the first line of which says what it does.
        trains: models are trained for it.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m sinklab.studies.pathways.{module}", description=(about or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="of a comparison, with run.json and table.parquet")
    if trains:
        parser.add_argument("--store", type=Path, default=Path("sinklab-claims"), help="where trained models are kept")
        parser.add_argument("--jobs", type=int, help="processes at a time; by default one per GPU or core")
    return parser


def whole(folder: Path) -> StoredComparison:
    """The comparison in a folder, if it has every column of today.

    Raises:
        InputError, ResultError: a file is missing or damaged, the comparison was made by another protocol, or lacks columns.
    """
    record, table = read_run(folder), read_table(folder / "table.parquet")
    design, factors = design_of_record(record, folder)
    missing = missing_columns(table, one_rate=design.rate is not None, natural=is_natural(design.scale))
    if lacking := [column.name for columns in missing.values() for column in columns]:
        raise InputError(
            f"{folder} lacks the columns {', '.join(lacking)}; add them first (python -m sinklab.studies.pathways.added)"
        )
    return StoredComparison(folder, record, table, design, factors)


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


def design_of_record(record: Mapping[str, Any], folder: Path) -> tuple[Design, dict[str, float]]:
    """What a kept comparison compared, and the learning rates that it chose, by label.

    Raises:
        InputError: it was made by another protocol, or does not tell the settings of an operation.
    """
    if record.get("protocol") != PROTOCOL:
        raise InputError(f"{folder}: made by protocol {record.get('protocol', 1)}, and today's is {PROTOCOL}")
    published = {pathway.label: pathway for pathway in pathways_of()}
    compared = [published.get(label) or _with_settings(label, of, folder) for label, of in record["operations"].items()]
    choices = {label: Choice.of_dict(choice) for label, choice in record["rates"].items()}
    design = Design(
        compared,
        {label: of["intermediate_size"] for label, of in record["operations"].items()},
        record["scale"],
        record["base"],
        record["seeds"],
        record.get("rate"),
    )
    factors = factors_of(design, choices)
    return dataclasses.replace(design, dtype=_dtype_of(record, design, factors)), factors


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


def control_of(rate: float | None) -> Source:
    """The trainings that every comparison of its kind has of every operation, and by which those of today are recognised."""
    return "scale" if rate is None else "chosen"


def seeds_of_record(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """Label to the seeds of the evaluation that it was trained with; all, but for a comparison that was joined from two."""
    cells = record["cells"][control_of(record.get("rate"))]
    return {label: [int(seed) for seed in of] for label, of in cells.items()}


def _dtype_of(record: Mapping[str, Any], design: Design, factors: Mapping[str, float]) -> str | None:
    """In which its models were trained, on whatever machine, as their names tell; ``None`` where no such name is known."""
    label, seed = design.pathways[0].label, design.seeds[0]
    source = control_of(design.rate)
    name = record["cells"].get(source, {}).get(label, {}).get(str(seed))
    for dtype in ("bfloat16", "float32"):
        first = dataclasses.replace(design, seeds=[seed], dtype=dtype)
        if evaluation_cells(first, factors)[source][label, seed].name == name:
            return dtype
    return None


def same_loss(loss: float, stored: float) -> bool:
    """Whether two trainings that ended at these losses are one, made twice."""
    return abs(loss - stored) <= SAME_LOSS or (math.isnan(loss) and math.isnan(stored))
