"""What a run shows while it goes: a bar on a terminal or below the cell of a notebook, a line per record anywhere else."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sinklab.results.progress import Cell, in_notebook, is_quiet, is_watched

__all__ = ["Display", "display"]


class Display:
    """Shows nothing; the other kinds build on it.

    Args:
        steps: of the whole run.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def note(self, text: str) -> None:
        """A sentence about something that happened once."""

    def preparing(self, stage: str, done: int, total: int) -> None:
        """The data are being read; the signature of ``prepare_data``'s progress."""

    def step(self, step: int) -> None:
        """A step is done."""

    def record(self, step: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """Loss and speed since the last record."""

    def result(self, step: int, numbers: dict[str, float]) -> None:
        """Numbers of an evaluation or a measurement."""


class Lines(Display):
    """A line per record."""

    def note(self, text: str) -> None:
        self._print(text)

    def record(self, step: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        self._print(
            f"step {step}/{self.steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {_clock(seconds_left)} left"
        )

    def result(self, step: int, numbers: dict[str, float]) -> None:
        self._print(f"step {step}/{self.steps}  " + "  ".join(_number(name, value) for name, value in numbers.items()))

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar(Display):
    """A bar with the newest numbers behind it, on a terminal or below the cell of a notebook.

    Args:
        steps: of the whole run.
        draw: shows what is done: stage, how much of it, of how much, and the numbers.
        say: shows a sentence.
    """

    def __init__(self, steps: int, draw: Callable[[str, int, int, str], None], say: Callable[[str], None]) -> None:
        super().__init__(steps)
        self._draw, self._say = draw, say
        self._numbers: dict[str, str] = {}

    def note(self, text: str) -> None:
        self._say(text)

    def preparing(self, stage: str, done: int, total: int) -> None:
        self._draw(stage, done, total, "")

    def step(self, step: int) -> None:
        self._draw("training", step, self.steps, "  ".join(self._numbers.values()))

    def record(self, step: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        speed, left = f"{tokens_per_second:,.0f} tokens/s", f"{_clock(seconds_left)} left"
        self._numbers |= {"loss": f"loss {loss:.3f}", "speed": speed, "left": left}

    def result(self, step: int, numbers: dict[str, float]) -> None:
        self._numbers |= {name: _number(name, value) for name, value in numbers.items()}


@contextmanager
def display(steps: int, *, wanted: bool = True) -> Iterator[Display]:
    """The display for a notebook, or for where stderr goes; closed when the block ends."""
    if not wanted or is_quiet():
        yield Display(steps)
    elif in_notebook():
        cell = Cell()
        try:
            yield Bar(steps, cell, print)
        finally:
            cell.close()
    elif not is_watched():
        yield Lines(steps)
    else:
        numbers = TextColumn("{task.fields[numbers]}")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            numbers,
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bars:
            task = bars.add_task("", visible=False, total=None, numbers="")

            def draw(stage: str, done: int, total: int, words: str) -> None:
                if bars.tasks[task].description != stage:
                    bars.reset(task)  # the clock begins anew
                bars.update(task, description=stage, completed=done, total=total or None, numbers=words, visible=True)

            yield Bar(steps, draw, lambda text: bars.console.print(text, markup=False, highlight=False))


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _number(name: str, value: float) -> str:
    return f"{name.replace('_', ' ')} {value:.3g}" + (" %" if name.startswith("sink_rate") else "")
