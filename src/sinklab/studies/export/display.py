"""What the terminal shows of an export: each engine with its command, and what it makes of each part of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
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
        # In lines, as in the file: in a table the longest column leaves the others a word a line.
        for part in entry["parts"]:
            yield Text.assemble((part["part"], "bold"), f" ({part['wanted']}): {part['how']}: {part['says']}")
        if folder is None:
            yield Text(f"\n{entry['text']}".rstrip("\n"))
