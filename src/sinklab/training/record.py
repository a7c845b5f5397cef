"""run.json of a pre-training run: what was asked for, what it became, where it ran, and how far it has come."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import time
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from sinklab.errors import InputError
from sinklab.results.table import read_run, read_table, write_json

__all__ = ["RunRecord", "RunResult", "Status", "library_versions", "newest", "read_result", "weights_sha256"]

Status = Literal["finished", "diverged", "stopped"]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run gives.

    Attributes:
        folder: its output directory.
        table: the long table: probe ``training`` and those of the sinks, by ``step``.
        held_out_loss: newest held-out loss in nats, or ``None`` before the first.
        sink_rate: newest sink rate of position 0 in percent (Gu et al. 2024).
        status: ``finished``, ``diverged`` or ``stopped`` (by a signal; it can be resumed).
        tokens_per_second: median speed of training, measurements left out.
        steps: steps done.
        run: the contents of ``run.json``.
    """

    folder: Path
    table: pd.DataFrame
    held_out_loss: float | None
    sink_rate: float | None
    status: Status
    tokens_per_second: float | None
    steps: int
    run: dict[str, Any]


class RunRecord:
    """``run.json`` while the run goes; written anew, whole, whenever something is known.

    Args:
        folder: output directory of the run.
        fields: what is known from the start.
        writes: whether this process writes files.
    """

    def __init__(self, folder: Path, fields: dict[str, Any], *, writes: bool = True) -> None:
        self.path, self.fields, self.writes = folder / "run.json", fields, writes
        self._started, self._before = time.monotonic(), float(fields.get("wall_seconds", 0.0))

    def update(self, **fields: Any) -> None:
        """Set fields and write the file."""
        self.fields |= fields
        self.fields["wall_seconds"] = round(self._before + time.monotonic() - self._started, 3)
        if self.writes:
            write_json(self.fields, self.path)


def read_result(folder: Path) -> RunResult:
    """The result of a run that has ended, from its output directory.

    Raises:
        InputError: no run there, or one that has not ended.
    """
    run = read_run(folder)
    if run.get("kind") != "pretrain" or "result" not in run:
        raise InputError(f"{folder} holds no run of pretrain that has ended (status {run.get('status')!r} in run.json)")
    return RunResult(folder=folder, table=read_table(folder / "table.parquet"), status=run["status"], run=run, **run["result"])


def newest(table: pd.DataFrame) -> dict[str, float | None]:
    """The newest held-out loss and sink rate of position 0 in a table of a run, or ``None`` where there is none."""
    whole = table[table["layer"].isna()].sort_values("step", kind="stable")
    chosen = {
        "held_out_loss": whole[whole["metric"] == "held_out_loss"],
        "sink_rate": whole[(whole["metric"] == "gu2024") & (whole["key_position"] == 0)],
    }
    last = {name: rows["value"].iloc[-1] if len(rows) else None for name, rows in chosen.items()}
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
