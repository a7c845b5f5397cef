"""The output directory of an audit, read for a page: run record, summary, numbers and maps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sinklab.report.maps import Maps, read_maps
from sinklab.report.numbers import Numbers
from sinklab.report.schema import require_audit, require_kind
from sinklab.results.table import read_run

__all__ = ["Audit", "read_audit"]


@dataclasses.dataclass(frozen=True)
class Audit:
    """Everything a page is made from."""

    folder: Path
    run: dict[str, Any]
    summary: dict[str, Any]
    numbers: Numbers
    maps: Maps | None

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        config = self.run.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def model(self) -> str:
        """The model's name; the folder's when nothing says it."""
        return str(self.summary.get("model") or self.config.get("model") or self.folder.name)

    @property
    def operation(self) -> str:
        """The attention operation's name."""
        return str(self.summary.get("operation") or self.config.get("operation") or "not recorded")

    @property
    def threshold(self) -> float:
        """Mean weight above which a head sinks."""
        value = self.config.get("threshold")
        return float(value) if isinstance(value, (int, float)) else 0.3

    @property
    def parts(self) -> list[tuple[str, Audit]]:
        """Of an encoder–decoder, each part by its name as an audit of its own; empty for other models.

        The loss is that of the decoder alone.
        """
        entries = self.summary.get("parts")
        entries = (
            [entry for entry in entries if isinstance(entry, dict) and entry.get("part")] if isinstance(entries, list) else []
        )
        return [
            (
                str(entry["part"]),
                dataclasses.replace(
                    self,
                    summary={**self.summary, "parts": [], **entry} | ({} if entry["part"] == "decoder" else {"loss": None}),
                    numbers=Numbers(self.folder / "table.parquet", self.config, str(entry["part"])),
                ),
            )
            for entry in entries
        ]

    @property
    def by_part(self) -> list[tuple[str, Audit]]:
        """:attr:`parts`, or the audit with the numbers of each part where sinks were looked for in all parts at once.

        That is so of older audits of encoder–decoders of pictures, such as a DETR. Of a model without parts it is the audit,
        without a name.
        """
        if self.parts or len(self.numbers.parts) < 2:
            return self.parts or [("", self)]
        path = self.folder / "table.parquet"
        named = ((name, Numbers(path, self.config, name)) for name in self.numbers.parts)
        return [(name, dataclasses.replace(self, numbers=numbers)) for name, numbers in named]

    @property
    def num_positions(self) -> int:
        """Number of positions that the page must be able to show."""
        known = [self.numbers.max_position + 1, self.maps.seq_len if self.maps else 0]
        return max(known)


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
    require_audit(summary, folder / "summary.json")
    config = run.get("config")
    numbers = Numbers(folder / "table.parquet", config if isinstance(config, dict) else {})
    return Audit(folder, run, summary, numbers, read_maps(folder / "maps.safetensors"))
