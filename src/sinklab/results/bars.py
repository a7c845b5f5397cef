"""Progress: what a run calls at every step, and the bars that follow it on a terminal and in a notebook."""

from __future__ import annotations

import html
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sinklab.results.voice import Pace, is_watched

__all__ = ["DONE", "DONE_OF_STAGE", "Cell", "Progress", "bars", "in_notebook", "notebook_bars", "silent"]

Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it and its total."""

DONE = "what is done and what there is in all"
"""What follows one stage is called with, in words."""

DONE_OF_STAGE = f"the stage, {DONE}"
"""What a :data:`Progress` is called with, in words."""

REFRESH = 0.2
"""Seconds between two drawings of a cell; every one is a message to the browser."""


def silent(stage: str, done: int, total: int) -> None:
    """The progress of somebody who does not watch."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook (Jupyter, VS Code, Colab), which draws HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Cell:
    """Bars below the cell that runs: plain HTML, replaced as it goes on and gone at the end; it needs no widgets."""

    def __init__(self) -> None:
        host = importlib.import_module("IPython.display")  # of the notebook, and no dependency of ours
        self._html = host.HTML
        self._handle = host.display(host.HTML(""), display_id=True)
        self._begun = self._drawn = time.monotonic()
        self._stages: dict[str, tuple[int, int, str]] = {}

    def update(self, stage: str, done: int, total: int | None, numbers: str = "") -> None:
        """Draw a stage anew, at most every :data:`REFRESH` seconds; its end always.

        Args:
            numbers: what stands behind the bar.
        """
        self._stages[stage] = (done, total or 0, numbers)
        now = time.monotonic()
        if now - self._drawn >= REFRESH or done == total:
            self._drawn = now
            self._handle.update(self._html("".join(self._line(name) for name in list(self._stages)[-LINES:])))

    def close(self) -> None:
        """Leave nothing behind."""
        self._handle.update(self._html(""))

    def _line(self, stage: str) -> str:
        done, total, numbers = self._stages[stage]
        bar = f'<progress value="{done}" max="{total}" style="width: 16em"></progress>' if total else "<progress></progress>"
        words = [html.escape(stage), bar, f"{done:,} of {total:,}" if total else "", html.escape(numbers)]
        seconds = time.monotonic() - self._begun
        return f'<div style="font: 13px monospace">{" ".join(filter(None, words))} · {seconds:.0f} s</div>'


LINES = 4
"""Stages that are drawn, the newest."""


@contextmanager
def notebook_bars() -> Iterator[Progress]:
    """Bars below the running cell of a notebook; nothing anywhere else."""
    if not in_notebook():
        yield silent
        return
    cell = Cell()
    try:
        yield cell.update
    finally:
        cell.close()


@contextmanager
def bars() -> Iterator[Progress]:
    """Bars on a terminal's stderr, which says of long stages how long they take, or below the running cell of a notebook;
    nothing anywhere else.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    if in_notebook():
        with notebook_bars() as progress:
            yield progress
        return
    if not is_watched():
        yield silent
        return
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    with Bars(*columns, console=Console(stderr=True), transient=True) as drawn:
        tasks: dict[str, TaskID] = {}
        pace = Pace()

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = drawn.add_task(stage, total=total)
            drawn.update(tasks[stage], completed=done, total=total)
            said = pace.announcement(stage, done, total)
            if said is not None:
                drawn.console.print(said, markup=False, highlight=False)

        yield update
