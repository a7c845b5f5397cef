"""Clock: how many cells a grid has and how long they will take, estimated from those that have been read."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from sinklab.results.run import Progress

__all__ = ["Clock"]

WRONG = 1.5
"""An estimate that turns out to be wrong by more than this factor is replaced by a new one, aloud."""

SHORT = 10.0
"""Seconds below which nobody minds how wrong an estimate was."""


class Clock:
    """Says how long the rest will take, by the tokens that the model computes: after the first cell, and where that was wrong.

    A token takes longer under some policies (one that scores tokens reads them one by one), so that cells are of kinds: the
    first one gives the pace of all, until one of the other kind has been timed.

    Args:
        cells: kind, and tokens that are computed, of every cell.
        say: called with a sentence.
        progress: called with task, tokens that have been computed for it, and those in all.
    """

    def __init__(self, cells: Iterable[tuple[str, int]], say: Callable[[str], None], progress: Progress) -> None:
        self.say, self.progress = say, progress
        self._left: Counter[str] = Counter()
        for kind, tokens in cells:
            self._left[kind] += tokens
        self._pace: dict[str, float] = {}

    @property
    def tokens(self) -> int:
        """Tokens that are still to be computed."""
        return self._left.total()

    def skip(self, kind: str, tokens: int) -> None:
        """A cell of an earlier run, which need not be read."""
        self._left[kind] -= tokens

    @contextlib.contextmanager
    def cell(self, kind: str, tokens: int) -> Iterator[None]:
        """One cell, for which so many tokens are computed; one that fails is not timed."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._left[kind] -= tokens
        if kind not in self._pace and tokens and self.tokens:
            self._announce(kind, tokens, time.monotonic() - started)

    def _announce(self, kind: str, tokens: int, seconds: float) -> None:
        first, before = not self._pace, self._rest()
        self._pace[kind] = seconds / tokens
        rest = self._rest()
        if first:
            self.say(
                f"the first cell took {spoken(seconds)}; by the tokens that are computed the others take about {spoken(rest)}"
            )
        elif max(before, rest) >= SHORT and not 1 / WRONG <= rest / max(before, 1e-9) <= WRONG:
            pace = "slower" if rest > before else "faster"
            self.say(f"a cell under {kind} took {spoken(seconds)}, {pace} by token; what is left takes about {spoken(rest)}")

    def _rest(self) -> float:
        """Seconds that what is left takes, each kind at its own pace, or at that of the first cell."""
        first = next(iter(self._pace.values()), 0.0)
        return sum(tokens * self._pace.get(kind, first) for kind, tokens in self._left.items())


def spoken(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
