"""What a run leaves behind while it goes: run.json, and the table that grows by measurements."""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from sinklab.errors import InputError
from sinklab.results.blocks import Block, Facts, counted
from sinklab.results.run import Result
from sinklab.results.table import append, make_table, read_run, read_table, write_json, write_table

Status = Literal["finished", "diverged", "stopped"]


class RunRecord:
    """``run.json`` while the run goes; written anew, whole, whenever something is known, by the process that ``writes``."""

    def __init__(self, folder: Path, fields: dict[str, Any], *, writes: bool = True) -> None:
        self.path, self.fields, self.writes = folder / "run.json", fields, writes
        self._started, self._before = time.monotonic(), float(fields.get("wall_seconds", 0.0))

    def update(self, **fields: object) -> None:
        """Set fields and write the file."""
        self.fields |= fields
        self.fields["wall_seconds"] = round(self._before + time.monotonic() - self._started, 3)
        if self.writes:
            write_json(self.fields, self.path)


def result_of(folder: Path, table: pd.DataFrame, record: dict[str, Any]) -> Result:
    """What a run gives.

    ``summary`` has the ``folder``, the ``status`` (``finished``, ``diverged``, or ``stopped`` by a signal; it can be resumed),
    the newest ``held_out_loss`` in nats and ``sink_rate`` of position 0 in percent (Gu et al. 2024), the median
    ``tokens_per_second`` without measurements, the ``steps`` that are done, and a ``warning`` where the sink rate says little.
    """
    warning = {"warning": record["warning"]} if record.get("warning") else {}
    summary = {"folder": str(folder), "status": record["status"], **record["result"], **warning}
    return Result(summary, table, record, folder, display)


def read_result(folder: Path) -> Result:
    """The result of a run that has ended, from its output directory."""
    record = read_run(folder)
    if record.get("kind") != "pretrain" or "result" not in record:
        raise InputError(f"{folder} holds no run of pretrain that has ended (status {record.get('status')!r} in run.json)")
    return result_of(folder, read_table(folder / "table.parquet"), record)


def display(result: Result) -> Iterator[Block]:
    """The few numbers that say how the run went, and where the rest is."""
    summary, folder = result.summary, Path(result.summary["folder"])
    loss, rate, speed = (summary[name] for name in ("held_out_loss", "sink_rate", "tokens_per_second"))
    threshold = result.record["config"]["watch"]["threshold"]
    lines = {
        "status": f"{summary['status']} after {counted(summary['steps'], 'step')}"
        + (", and can be resumed" if summary["status"] == "stopped" else ""),
        "why": (result.record.get("divergence") or {}).get("reason", ""),
        "loss": "" if loss is None else f"{loss:.3f} nats per held-out token",
        "sink rate": "" if rate is None else f"{rate:.2f} % at position 0 (Gu et al. 2024, threshold {threshold:g})",
        "warning": summary.get("warning", "") if rate is not None else "",
        "speed": "" if speed is None else f"{speed:,.0f} tokens/s",
        "table": str(folder / "table.parquet"),
        "model": str(folder / "model") if (folder / "model").is_dir() else "",
    }
    yield Facts([(name, text) for name, text in lines.items() if text])


def newest(table: pd.DataFrame) -> dict[str, float | None]:
    """The newest held-out loss and sink rate of position 0 in a table of a run, or ``None`` where there is none.

    What was measured before the training diverged says nothing of the model that it ended with.
    """
    whole = table[table["layer"].isna()].sort_values("step", kind="stable")
    diverged = max(whole.loc[whole["metric"] == "diverged_at", "step"], default=0)
    chosen = {
        "held_out_loss": whole[whole["metric"] == "held_out_loss"],
        "sink_rate": whole[(whole["metric"] == "gu2024") & (whole["key_position"] == 0)],
    }
    last = {
        name: None if rows.empty or rows["step"].iloc[-1] < diverged else rows["value"].iloc[-1]
        for name, rows in chosen.items()
    }
    return {name: None if value is None or pd.isna(value) else float(value) for name, value in last.items()}


def weights_sha256(folder: Path) -> str | None:
    """Identity of a saved model: SHA-256 of its file of weights, or of the hashes of several; ``None`` where there is none."""
    digests = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256"))
    if len(digests) < 2:
        return digests[0].hexdigest() if digests else None
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def library_versions() -> dict[str, str]:
    """Versions of what training needs beside what measuring does."""
    return {name: importlib.metadata.version(name) for name in ("accelerate", "datasets", "pydantic")}


LOOSE_ROWS = 4096
"""Rows that are held as they came; so many together become a table."""

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
        self._tables: list[pd.DataFrame] = []
        self._loose: list[dict[str, object]] = []
        self._started = time.monotonic()
        self._writing = 0.0

    def add(self, rows: Iterable[Mapping[str, object]], **columns: object) -> None:
        """Add rows of a probe; ``columns`` are the same in all of them and go before those of the run and of the rows."""
        self._loose += [{**row, **self.columns, **columns} for row in rows]
        if len(self._loose) >= LOOSE_ROWS:
            self._tables.append(make_table(self._loose))
            self._loose = []

    def resume(self, step: int) -> None:
        """Take over the rows that an earlier process wrote, up to ``step``; what came later will be measured again."""
        assert self.path is not None  # a table in memory has no earlier process
        earlier = read_table(self.path)
        self._tables, self._loose = [earlier[earlier["step"] <= step]], []
        self.resumed = True

    def table(self) -> pd.DataFrame:
        """All rows so far."""
        return append([*self._tables, make_table(self._loose)])

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
