"""The output directory of an audit, read for a page or a comparison: run record, what was found, numbers and maps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sinklab.report.maps import Maps, read_maps
from sinklab.report.numbers import Numbers
from sinklab.report.page import require_kind
from sinklab.results.record import from_json
from sinklab.results.table import read_run
from sinklab.studies.audit.found import AuditFound, SinksFound

__all__ = ["Audit", "View", "read_audit"]


@dataclasses.dataclass(frozen=True)
class View:
    """A model, or a part of an encoder–decoder: the sinks that were found, and the numbers of the table."""

    found: SinksFound
    numbers: Numbers

    @property
    def part(self) -> str:
        """Empty where the model has no parts."""
        return self.found.part

    def rate(self, name: str) -> float | None:
        """The whole model's number under one definition of a sink rate, in percent, whatever unit the table has."""
        value, rows = self.numbers.whole("sink_rate", name, position=0), self.numbers.rows("sink_rate", name)
        return None if value is None or rows is None else value if rows.unit == "percent" else 100 * value


@dataclasses.dataclass(frozen=True)
class Audit:
    """Everything a page is made from.

    Attributes:
        summary: ``summary.json``, in which the sections are.
        views: each part of an encoder–decoder; of another model one for the whole.
    """

    folder: Path
    run: dict[str, Any]
    summary: dict[str, Any]
    found: AuditFound
    numbers: Numbers
    views: list[View]
    maps: Maps | None

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        config: dict[str, Any] = self.run["config"]
        return config

    @property
    def num_positions(self) -> int:
        """Number of positions that the page must be able to show."""
        return max(self.numbers.max_position + 1, self.maps.seq_len if self.maps else 0)


def read_audit(folder: Path) -> Audit:
    """Read the output directory of an audit.

    Raises:
        InputError: the run is of another command; a file is missing or is not what its name says (``maps.safetensors`` may be
            absent).
        ResultError: the summary, the table or the maps do not follow their schema.
    """
    folder = Path(folder)
    run = read_run(folder)
    require_kind(run, folder, "audit")
    summary = read_run(folder, "summary.json")
    found = from_json(AuditFound, summary, folder / "summary.json")
    table, config = folder / "table.parquet", run["config"]
    numbers = Numbers(table, config)
    views = [View(part, Numbers(table, config, part.part)) for part in found.parts] or [View(found, numbers)]
    return Audit(folder, run, summary, found, numbers, views, read_maps(folder / "maps.safetensors"))
