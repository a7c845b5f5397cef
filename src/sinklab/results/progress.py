"""What is said while a run is at work: progress bars, warnings, how long a stage still takes, and quiet."""

from __future__ import annotations

import html
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "DONE",
    "DONE_OF_STAGE",
    "LONG",
    "Cell",
    "Pace",
    "Progress",
    "SinklabWarning",
    "bars",
    "duration",
    "in_notebook",
    "is_quiet",
    "is_watched",
    "notebook_bars",
    "quietly",
    "say",
    "silent",
    "warn",
]

LONG = 30.0
"""Seconds of a stage from which on it is announced how long it takes."""

SETTLED = 2.0
"""Seconds of a stage after which its pace is believed; what comes first is often slow."""

_quiet = 0


@contextmanager
def quietly(wanted: bool = True) -> Iterator[None]:
    """Show neither progress nor hints within the block, in whatever way they are shown; results and errors are shown."""
    global _quiet
    _quiet += wanted
    try:
        yield
    finally:
        _quiet -= wanted


def is_quiet() -> bool:
    """Whether this is within a block of :func:`quietly`."""
    return _quiet > 0


def is_watched() -> bool:
    """Whether somebody sees what is shown: stderr is a terminal (whatever ``FORCE_COLOR`` says of colours), and not quiet."""
    return not is_quiet() and sys.stderr.isatty()


def say(text: str) -> None:
    """A sentence on stderr about what is going to happen or has happened."""
    if not is_quiet():
        print(text, file=sys.stderr, flush=True)


class SinklabWarning(UserWarning):
    """What this library warns of; the command line says it in a line of its own."""


def warn(text: str) -> None:
    """Warn in the name of the line outside of the library by which it was called."""
    level, frame = 1, sys._getframe()
    while _is_ours(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, SinklabWarning, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame belongs to this library, or to those through which it is called on the way."""
    return str(frame.f_globals.get("__name__")).split(".")[0] in ("functools", "sinklab", "torch", "transformers")


def duration(seconds: float) -> str:
    """An estimated time, rounded: ``less than ten seconds``, ``about 3 minutes``."""
    if seconds < 10:
        return "less than ten seconds"
    if seconds < 90:
        return f"about {10 * round(seconds / 10)} seconds"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.1f} hours"


class Pace:
    """How long stages take, from how long their parts took so far; what was there at the first call took no time.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()
        self._begun: dict[str, tuple[float, int]] = {}
        self._announced: set[str] = set()

    def announcement(self, stage: str, done: int, total: int) -> str | None:
        """One sentence, once for each stage, as soon as it is known to take longer than :data:`LONG` from now on."""
        now = self._clock()
        if stage not in self._begun:
            # The first word of many stages is that one part is done: the time since the last word was for that part.
            self._begun[stage] = (now, done) if done != 1 else (self._last, 0)
        began, there = self._begun[stage]
        self._last = now
        if stage in self._announced or done <= there or now - began < SETTLED:
            return None
        left = (now - began) / (done - there) * (total - done)
        if left <= LONG:
            return None
        self._announced.add(stage)
        return f"{stage}: {duration(left)} left"


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
