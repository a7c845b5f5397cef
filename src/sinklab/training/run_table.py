"""The long table of a run while it grows: rows are added as training goes, and written whole or not at all."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from sinklab.results.table import COLUMNS, append, make_table, read_table, write_table

__all__ = ["RunTable"]

LOOSE_ROWS = 4096
"""Rows that are held as they came, some 220 bytes each. So many together are packed as compressed parquet, in which a row is a
few bytes: a measurement gives some hundred rows, and a training has thousands of measurements."""

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

    def __init__(self, path: Path | None, columns: Mapping[str, object], *, writes: bool = True) -> None:
        self.path, self.columns, self.writes = path, dict(columns), writes
        self.resumed = False
        self._packed: list[bytes] = []
        self._loose: list[dict[str, object]] = []
        self._started = time.monotonic()
        self._writing = 0.0

    def add(self, rows: Iterable[Mapping[str, object]], **columns: object) -> None:
        """Add rows of a probe; ``columns`` are the same in all of them and go before those of the run and of the rows."""
        self._loose += [{**row, **self.columns, **columns} for row in rows]
        if len(self._loose) >= LOOSE_ROWS:
            self._packed.append(_packed(make_table(self._loose)))
            self._loose = []

    def resume(self, step: int) -> None:
        """Take over the rows that an earlier process wrote, up to ``step``; what came later will be measured again.

        Raises:
            InputError: the file is not there.
            ResultError: it does not follow the schema.
        """
        assert self.path is not None  # a table in memory has no earlier process
        earlier = read_table(self.path)
        self._packed, self._loose = [_packed(earlier[earlier["step"] <= step])], []
        self.resumed = True

    def table(self) -> pd.DataFrame:
        """All rows so far."""
        return append([*map(_unpacked, self._packed), make_table(self._loose)])

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


def _packed(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False, compression="zstd")
    return buffer.getvalue()


def _unpacked(packed: bytes) -> pd.DataFrame:
    return pd.read_parquet(io.BytesIO(packed)).astype({name: dtype for name, (dtype, _) in COLUMNS.items()})
