"""What the terminal shows of an export: each engine with its command, and what it makes of each part of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinklab.results.summaries.cache import ExportEntry

__all__ = ["display_exports"]


def display_exports(entries: Sequence[ExportEntry], folder: Path | None) -> Iterator[RenderableType]:
    """A block for each engine.

    Args:
        folder: where the files lie; ``None`` where they were not written, and their texts are shown.
    """
    for entry in entries:
        if entry["refused"]:
            yield Text(f"\n{entry['engine']}: {entry['policy'] or 'no policy'} not written: {entry['refused']}")
            continue
        where = "" if folder is None else f", {folder / entry['file']}"
        yield Text(f"\n{entry['engine']}: {entry['policy']}{where}\n  {entry['command']}\n")
        shown = Table(box=None, pad_edge=False)
        for heading in ("part", "wanted", "how", "by"):
            shown.add_column(heading)
        for part in entry["parts"]:
            shown.add_row(part["part"], part["wanted"], part["how"], part["says"])
        yield shown
        if folder is None:
            yield Text(f"\n{entry['text']}".rstrip("\n"))
