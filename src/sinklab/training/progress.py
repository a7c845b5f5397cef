"""What a run shows while it goes: a bar on a terminal or below the cell of a notebook, a line per record anywhere else."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
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


class Newest(Display):
    """Keeps the newest numbers, which stand behind a bar."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self._numbers: dict[str, str] = {}

    def record(self, step: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        self._show(loss=f"loss {loss:.3f}", speed=f"{tokens_per_second:,.0f} tokens/s", left=f"{_clock(seconds_left)} left")

    def result(self, step: int, numbers: dict[str, float]) -> None:
        self._show(**{name: _number(name, value) for name, value in numbers.items()})

    def _show(self, **numbers: str) -> None:
        self._numbers.update(numbers)

    @property
    def _words(self) -> str:
        return "  ".join(self._numbers.values())


class InCell(Newest):
    """A bar below the cell of a notebook."""

    def __init__(self, steps: int, cell: Cell) -> None:
        super().__init__(steps)
        self._cell = cell

    def note(self, text: str) -> None:
        print(text)

    def preparing(self, stage: str, done: int, total: int) -> None:
        self._cell.update(stage, done, total)

    def step(self, step: int) -> None:
        self._cell.update("training", step, self.steps, self._words)


class Bar(Newest):
    """A bar on a terminal."""

    def __init__(self, steps: int, bars: Progress) -> None:
        super().__init__(steps)
        self._bars = bars
        self._data = bars.add_task("", visible=False, total=None, numbers="")
        self._task = bars.add_task("training", total=steps, numbers="", visible=False)

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def preparing(self, stage: str, done: int, total: int) -> None:
        self._bars.update(self._data, description=stage, completed=done, total=total or None, visible=True)

    def step(self, step: int) -> None:
        self._bars.update(self._data, visible=False)
        self._bars.update(self._task, completed=step, visible=True)

    def _show(self, **numbers: str) -> None:
        super()._show(**numbers)
        self._bars.update(self._task, numbers=self._words)


@contextmanager
def display(steps: int, *, wanted: bool = True) -> Iterator[Display]:
    """The display for a notebook, or for where stderr goes; closed when the block ends."""
    if not wanted or is_quiet():
        yield Display(steps)
    elif in_notebook():
        cell = Cell()
        try:
            yield InCell(steps, cell)
        finally:
            cell.close()
    elif not is_watched():
        yield Lines(steps)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bars:
            yield Bar(steps, bars)


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _number(name: str, value: float) -> str:
    return f"{name.replace('_', ' ')} {value:.3g}" + (" %" if name.startswith("sink_rate") else "")
