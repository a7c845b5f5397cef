"""What a sweep shows while it goes, on stderr: bars on a terminal, a line per event anywhere else."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sinklab.results.progress import is_quiet, is_watched

__all__ = ["Watch", "watching"]


class Watch:
    """Counts cells and shows nothing; the other kinds show.

    Args:
        cells: of the whole sweep.
        earlier: of these, ended before.
    """

    def __init__(self, cells: int, earlier: int) -> None:
        self.cells, self.ended_cells, self.failed = cells, 0, 0
        self.earlier = earlier
        self.running: list[str] = []
        self._begun = time.monotonic()

    def started(self, name: str) -> None:
        """A cell has begun to run, or runs again."""
        if name not in self.running:
            self.running.append(name)

    def again(self, name: str, why: str) -> None:
        """A cell died and will be run again."""
        self.note(f"{name}: {why}; it goes on from its last checkpoint")

    def ended(self, name: str, outcome: str, *, failed: bool = False) -> None:
        """A cell has come to its end."""
        if name in self.running:
            self.running.remove(name)
        self.ended_cells += 1
        self.failed += failed
        self.note(f"[{self.earlier + self.ended_cells}/{self.cells}] {name}: {outcome}  {self._left()}".rstrip())

    def tick(self, newest: Callable[[str], str]) -> None:
        """Called a few times a second; ``newest`` gives the last line that a cell printed."""

    def note(self, text: str) -> None:
        """A sentence about something that happened once."""

    def _left(self) -> str:
        left = self.cells - self.earlier - self.ended_cells
        if not left or not self.ended_cells:
            return ""
        seconds = (time.monotonic() - self._begun) / self.ended_cells * left
        return f"{datetime.timedelta(seconds=round(seconds))} left"


class Lines(Watch):
    """A line per event."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bars(Watch):
    """A bar of the cells, and below it what each running one printed last."""

    def __init__(self, cells: int, earlier: int, bars: Progress) -> None:
        super().__init__(cells, earlier)
        self._bars = bars
        self._all = bars.add_task("cells", total=cells, completed=earlier, text="")
        self._tasks: dict[str, TaskID] = {}

    def tick(self, newest: Callable[[str], str]) -> None:
        for name in [name for name in self._tasks if name not in self.running]:
            self._bars.remove_task(self._tasks.pop(name))
        for name in self.running:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(f"  {escape(name)}", total=None, text="")
            self._bars.update(self._tasks[name], text=escape(newest(name)))
        failed = f", {self.failed} failed" if self.failed else ""
        self._bars.update(
            self._all,
            completed=self.earlier + self.ended_cells,
            text=f"{self.earlier + self.ended_cells}/{self.cells}, {len(self.running)} running{failed}  {self._left()}",
        )

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)


@contextmanager
def watching(cells: int, earlier: int, *, wanted: bool = True) -> Iterator[Watch]:
    """The watch for where stderr goes; closed when the block ends."""
    if not wanted or is_quiet():
        yield Watch(cells, earlier)
    elif not is_watched():
        yield Lines(cells, earlier)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bars:
            yield Bars(cells, earlier, bars)
