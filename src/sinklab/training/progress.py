"""What a run shows while it goes: a bar on a terminal or below the cell of a notebook, a line per record anywhere else."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sinklab.results.progress import Cell, in_notebook, is_quiet, is_watched


class Display:
    """A bar with the newest numbers behind it, a line per record, or nothing.

    Args:
        steps: of the whole run.
        say: shows a sentence; without it nothing is shown.
        draw: shows what is done: stage, how much of it, of how much, and the numbers.
    """

    def __init__(
        self, steps: int, say: Callable[[str], None] | None = None, draw: Callable[[str, int, int, str], None] | None = None
    ) -> None:
        self.steps, self._say, self._draw = steps, say, draw
        self._numbers: dict[str, str] = {}

    def note(self, text: str) -> None:
        """A sentence about something that happened once."""
        if self._say is not None:
            self._say(text)

    def preparing(self, stage: str, done: int, total: int) -> None:
        """The data are being read; the signature of ``prepare_data``'s progress."""
        if self._draw is not None:
            self._draw(stage, done, total, "")

    def step(self, step: int) -> None:
        """A step is done."""
        if self._draw is not None:
            self._draw("training", step, self.steps, "  ".join(self._numbers.values()))

    def record(self, step: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """Loss and speed since the last record."""
        left = datetime.timedelta(seconds=round(seconds_left))
        self._show(step, {"loss": f"loss {loss:.4f}", "speed": f"{tokens_per_second:,.0f} tokens/s", "left": f"{left} left"})

    def result(self, step: int, numbers: dict[str, float]) -> None:
        """Numbers of an evaluation or a measurement."""
        texts = {name: f"{name.replace('_', ' ')} {value:.3g}" for name, value in numbers.items()}
        self._show(step, {name: f"{text} %" if name.startswith("sink_rate") else text for name, text in texts.items()})

    def _show(self, step: int, texts: dict[str, str]) -> None:
        if self._draw is not None:
            self._numbers |= texts
        else:
            self.note("  ".join([f"step {step}/{self.steps}", *texts.values()]))


@contextmanager
def display(steps: int, *, wanted: bool = True) -> Iterator[Display]:
    """The display for a notebook, or for where stderr goes; closed when the block ends."""
    if not wanted or is_quiet():
        yield Display(steps)
    elif in_notebook():
        cell = Cell()
        try:
            yield Display(steps, print, cell)
        finally:
            cell.close()
    elif not is_watched():
        yield Display(steps, lambda text: print(text, file=sys.stderr, flush=True))
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

            yield Display(steps, lambda text: bars.console.print(text, markup=False, highlight=False), draw)
