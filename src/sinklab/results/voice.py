"""What is said besides results and errors: whether anybody watches, quiet, warnings, and how long a stage still takes."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["LONG", "Pace", "SinklabWarning", "duration", "is_quiet", "is_watched", "plural", "quietly", "say", "warn"]

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


def plural(number: int, noun: str) -> str:
    """A number with its noun: "1 sample", "1,000 samples"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
