"""Clock: how many cells a grid has and how long they will take, estimated from the first one that is read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from sinklab.results.run import Progress

__all__ = ["Clock"]


class Clock:
    """Says once how long the rest will take, by the tokens that are read.

    Args:
        tokens: that all cells read.
        say: called with a sentence after the first cell.
        progress: called with task, cells done and cells in all.
    """

    def __init__(self, tokens: int, say: Callable[[str], None], progress: Progress) -> None:
        self.tokens, self.say, self.progress = tokens, say, progress
        self._said = False

    def skip(self, tokens: int) -> None:
        """A cell of an earlier run, which need not be read."""
        self.tokens -= tokens

    @contextlib.contextmanager
    def cell(self, tokens: int) -> Iterator[None]:
        """One cell, in which so many tokens are read."""
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        if not self._said and self.tokens > tokens:
            self._said = True
            rest = seconds * (self.tokens - tokens) / tokens
            self.say(f"the first cell took {spoken(seconds)}; by its tokens the others take about {spoken(rest)}")


def spoken(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
