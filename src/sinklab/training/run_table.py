"""The long table of a run while it grows: rows are added as training goes, and written whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.results.table import append, make_table, read_table, write_table

__all__ = ["RunTable"]

WRITING_SHARE = 0.01
"""Largest share of the wall time that may go into writing a table that nobody waits for."""


class RunTable:
    """Rows of one run, in the schema of :data:`sinklab.results.table.COLUMNS`.

    Args:
        path: the parquet file; ``None`` keeps the rows in memory only.
        columns: columns that are the same in all rows: ``run_id``, ``model``, ``operation``, ``corpus``, ``seed``, ….
        writes: whether this process writes files at all; of several processes only the main one does.

    Attributes:
        resumed: whether rows of an earlier process were taken over.
    """

    def __init__(self, path: Path | None, columns: Mapping[str, Any], *, writes: bool = True) -> None:
        self.path, self.columns, self.writes = path, dict(columns), writes
        self.resumed = False
        self._made = make_table([])
        self._new: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._writing = 0.0

    def add(self, rows: Iterable[Mapping[str, Any]], **columns: Any) -> None:
        """Add rows of a probe; ``columns`` are the same in all of them and go before those of the run and of the rows."""
        self._new += [{**row, **self.columns, **columns} for row in rows]

    def resume(self, step: int) -> None:
        """Take over the rows that an earlier process wrote, up to ``step``; what came later will be measured again.

        Raises:
            InputError: the file is not there.
            ResultError: it does not follow the schema.
        """
        assert self.path is not None  # a table in memory has no earlier process
        earlier = read_table(self.path)
        self._made, self.resumed = earlier[earlier["step"] <= step], True

    def table(self) -> pd.DataFrame:
        """All rows so far."""
        if self._new:
            self._made, self._new = append([self._made, make_table(self._new)]), []
        return self._made

    def write(self, *, now: bool = True) -> None:
        """Write the file.

        Args:
            now: ``False`` leaves it for later while writing has taken more than its share of the time.
        """
        started = time.monotonic()
        if self.path is None or not self.writes or (not now and self._writing > WRITING_SHARE * (started - self._started)):
            return
        write_table(self.table(), self.path)
        self._writing += time.monotonic() - started
