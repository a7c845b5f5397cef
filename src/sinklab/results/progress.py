"""What is said while a run is at work: bars or lines of every stage, how long it all still takes, warnings, and quiet."""

from __future__ import annotations

import dataclasses
import html
import importlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

SETTLED = 2.0
"""Seconds of a stage after which its pace is believed; what comes first is often slow."""

FIRST_LINE = 2.0
"""Seconds of a stage after which a line says that it is at work, where no bars are drawn."""

LINE_EVERY = 30.0
"""Seconds between two such lines of long stages."""

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


@dataclasses.dataclass
class _Stage:
    """When a stage began, how many parts were there then, and how many of all are done at the last word."""

    began: float
    there: int
    done: int = 0
    total: int = 0
    when: float = 0.0

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0


class Pace:
    """How long stages take, from how long their parts took so far; what was there at the first call took no time.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._deadline = clock, clock(), float("inf")
        self._stages: dict[str, _Stage] = {}
        self._costs: dict[str, float] = {}

    def plan(self, costs: Mapping[str, float], within: float = float("inf")) -> None:
        """Stages to what each costs beside the others, in any unit; those of an earlier plan stay.

        Args:
            within: seconds after which no further part of a stage is begun.
        """
        self._costs |= costs
        self._deadline = min(self._deadline, self._clock() + within)

    def update(self, stage: str, done: int, total: int) -> None:
        """So much of a stage is done."""
        now = self._clock()
        if stage not in self._stages or done < self._stages[stage].done:  # or it begins again
            # The first word of many stages is that one part is done: the time since the last word was for that part.
            self._stages[stage] = _Stage(now, done) if done != 1 else _Stage(self._last, 0)
        self._last = now
        at = self._stages[stage]
        at.done, at.total, at.when = done, total, now

    def left(self, stage: str) -> float | None:
        """Seconds that a stage still takes; ``None`` where nobody knows yet."""
        at = self._stages.get(stage)
        if at is None or at.done <= at.there or not at.total or at.when - at.began < SETTLED:
            return None
        now = self._clock()
        # A part that takes longer than those before it makes the estimate longer, while it lasts.
        each = max((at.when - at.began) / (at.done - at.there), (now - at.began) / (at.done - at.there + 1))
        return max(each * (at.total - at.done) - (now - at.when), 0.0)

    def share(self) -> float | None:
        """How much of the plan is done, in parts of one; ``None`` without one."""
        done = sum(cost * (self.done(stage) or 0.0) for stage, cost in self._costs.items())
        return done / sum(self._costs.values()) if self._costs else None

    def left_in_all(self) -> float | None:
        """Seconds that all stages of the plan still take together; ``None`` where nobody knows yet.

        Of a stage whose own pace is known as long as that says, so that the whole never takes less than a stage of it.
        """
        begun = {stage: self._stages[stage] for stage in self._costs if stage in self._stages}
        done = sum(self._costs[stage] * (at.done - at.there) / at.total for stage, at in begun.items() if at.total)
        spent = self._clock() - min((at.began for at in begun.values()), default=0.0)
        if done <= 0 or spent < SETTLED:
            return None
        ahead = {stage: 1 - (self.done(stage) or 0.0) for stage in self._costs}
        own = {stage: self.left(stage) for stage, share in ahead.items() if share}
        left = sum(spent / done * self._costs[stage] * ahead[stage] if known is None else known for stage, known in own.items())
        return max(min(left, self._deadline - self._clock()), *(known or 0.0 for known in own.values()), 0.0)

    def done(self, stage: str) -> float | None:
        """Share of a stage that is done; ``None`` where that is not known."""
        at = self._stages.get(stage)
        return at.share if at is not None and at.total else None

    def count(self, stage: str) -> str:
        """How much of a stage is done, in words."""
        at = self._stages.get(stage)
        return f"{at.done:,} of {at.total:,}" if at is not None and at.total else ""

    def words(self, stage: str) -> str:
        """How long a stage still takes, in words; empty where nobody knows yet, and at its end."""
        left = self.left(stage)
        return f"{duration(left)} left" if left else ""

    def words_in_all(self) -> str:
        """How long all stages still take, in words; empty where nobody knows yet, and at the end."""
        left = self.left_in_all()
        return f"{duration(left)} left in all" if left else ""


Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it and its total: with 0 before the first part, then after each."""


def plan(progress: Progress, costs: Mapping[str, float], within: float = float("inf")) -> None:
    """Tell whoever watches which stages come, so that what is left is said of all of them.

    Args:
        costs: stage to what it costs beside the others, in any unit, such as forwards times tokens.
        within: seconds after which no further part of a stage is begun.
    """
    told = getattr(progress, "plan", None)
    if told is not None:
        told(costs, within)


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
        self._stages: list[str] = []
        self._pace = Pace()
        self.plan = self._pace.plan

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Draw a stage anew, at most every :data:`REFRESH` seconds; its end always."""
        self._stages += [stage] if stage not in self._stages else []
        self._pace.update(stage, done, total)
        now = time.monotonic()
        if now - self._drawn >= REFRESH or done == total:
            self._drawn = now
            lines = [*map(self._line, self._stages[-LINES:]), _in_a_cell(self._pace.words_in_all())]
            self._handle.update(self._html("".join(lines)))

    def close(self) -> None:
        """Leave nothing behind."""
        self._handle.update(self._html(""))

    def _line(self, stage: str) -> str:
        share, seconds = self._pace.done(stage), f"{time.monotonic() - self._begun:.0f} s"
        bar = "<progress></progress>" if share is None else f'<progress value="{share:.3f}" style="width: 16em"></progress>'
        words = [self._pace.count(stage), seconds, self._pace.words(stage)]
        return _in_a_cell(f"{html.escape(stage)} {bar} {' · '.join(filter(None, words))}")


def _in_a_cell(line: str) -> str:
    return f'<div style="font: 13px monospace">{line}</div>' if line else ""


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
        yield cell
    finally:
        cell.close()


@contextmanager
def bars(first: str = "starting") -> Iterator[Progress]:
    """Bars on a terminal's stderr or below the running cell of a notebook, lines on any other stderr; nothing when quiet.

    They say how long each stage takes still, and all of them where a :func:`plan` was made. Something moves from the first
    moment on, between two stages too.

    Args:
        first: what goes on before the first stage.
    """
    if is_quiet() and not in_notebook():
        yield silent
        return
    shown = Cell() if in_notebook() else _Bars(first) if is_watched() else _Lines(first)
    try:
        yield shown
    finally:
        shown.close()


class Screen(NamedTuple):
    """What somebody sees of a run: how much of its stages is done, and sentences about what has happened."""

    progress: Progress = silent
    note: Callable[[str], None] = lambda text: None


@contextmanager
def on_screen(first: str, *, wanted: bool = True) -> Iterator[Screen]:
    """Bars and sentences, as :func:`bars` and :func:`say` show them, until the block ends; nothing where it is not wanted."""
    if not wanted:
        yield Screen()
        return
    with bars(first) as progress:
        yield Screen(progress, say)


class _Bars:
    """Bars of the newest stages, with the time that each has taken and takes still."""

    def __init__(self, first: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Task, TaskID, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Drawn
        from rich.text import Text

        self._pace = Pace()
        self.plan = self._pace.plan
        self._tasks: dict[str, TaskID] = {}
        words = self._words

        class Words(TextColumn):
            """rich itself forgets the speed of stages whose parts take long."""

            def render(self, task: Task) -> Text:
                return Text(words(task.id, task.description))

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), Words(""))
        self._drawn = Drawn(*columns, console=Console(stderr=True), transient=True)
        self._all = self._drawn.add_task(first, total=None)
        self._drawn.start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._pace.update(stage, done, total)
        if stage not in self._tasks:
            self._tasks[stage] = self._drawn.add_task(stage, total=total)
            for old in list(self._tasks.values())[:-LINES]:
                self._drawn.update(old, visible=False)
        self._drawn.update(self._tasks[stage], completed=done, total=total)
        share = self._pace.share()
        self._drawn.update(self._all, description="in all", completed=share or 0.0, total=None if share is None else 1.0)

    def _words(self, task: int, stage: str) -> str:
        if task == self._all:
            return self._pace.words_in_all()
        return ", ".join(filter(None, (self._pace.count(stage), self._pace.words(stage))))

    def close(self) -> None:
        """Leave nothing behind."""
        self._drawn.stop()


class _Lines:
    """A line about the stage at work, soon after it began and then seldom; short stages have none."""

    def __init__(self, first: str) -> None:
        self._pace = Pace()
        self.plan = self._pace.plan
        self._start = self._said = time.monotonic()
        self._stage, self._began, self._told = first, {first: self._start}, set[str]()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="sinklab-progress").start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._pace.update(stage, done, total)
        self._began.setdefault(stage, time.monotonic())
        self._stage = stage

    def _watch(self) -> None:
        while not self._ended.wait(FIRST_LINE / 8):
            now, stage, pace = time.monotonic(), self._stage, self._pace
            new = stage not in self._told and now - self._began[stage] >= FIRST_LINE
            if new or now - self._said >= max(LINE_EVERY, (now - self._start) / 20):
                self._said = now
                self._told.add(stage)
                count = f"{stage}: {pace.count(stage) or 'at work'}"
                say(", ".join(filter(None, (count, pace.words(stage), pace.words_in_all()))))

    def close(self) -> None:
        """Say no more."""
        self._ended.set()


class PartOf:
    """The progress of a part of a longer work: its stages are shown, and how much of its plan is done is that of one stage.

    Args:
        whole: of the work.
        stage: what the part is called in the plan of the work.
    """

    def __init__(self, whole: Progress, stage: str) -> None:
        self._whole, self._stage, self._pace = whole, stage, Pace()
        self.plan = self._pace.plan

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._pace.update(stage, done, total)
        share = self._pace.share()
        if share is not None:
            self._whole(self._stage, round(100 * share), 100)
        self._whole(stage, done, total)
