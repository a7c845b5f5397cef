"""Run and Result: what a command leaves behind, and how it reports while it works; needs neither torch nor transformers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

__all__ = ["Progress", "Result", "silent"]

Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it and its total."""

PIPE_WIDTH = 200
"""Columns of output that does not go to a terminal; long lines are for the reader's tools to wrap."""


def silent(stage: str, done: int, total: int) -> None:
    """The progress of somebody who does not watch."""


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """What a command returns: the answer, its numbers, how they were made, and where they lie.

    Attributes:
        summary: the answer as plain JSON values; ``summary.json`` of a folder and ``--json`` on the command line.
        table: the long table (:data:`sinklab.results.table.COLUMNS`).
        record: ``run.json``: kind, settings, versions, commit, hardware, seeds, wall time.
        folder: where it was written; ``None`` if it was not.
        display: gives what a terminal shows of a result: rich renderables or lines of text.
    """

    summary: dict[str, Any]
    table: pd.DataFrame
    record: dict[str, Any]
    folder: Path | None
    display: Callable[[Result], Iterable[RenderableType]]

    @property
    def kind(self) -> str:
        """The command that made it."""
        return str(self.record["kind"])

    def show(self) -> None:
        """Print on standard output what the command line prints."""
        from rich.console import Console

        # Made for each call, so that it writes to the stdout of the moment (tests and pagers replace it).
        console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        for part in self.display(self):
            console.print(part)
