"""The guard: one line for what a user can get wrong, and nothing for bugs, which are to be seen as bugs."""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType

from cyclopts import CycloptsError

from sinklab.errors import SinklabError

__all__ = ["INTERRUPTED", "TERMINATED", "USER_ERROR", "Terminated", "explain", "on_the_line", "terminable"]

USER_ERROR = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells expect."""
TERMINATED = 143
"""128 + SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception: all that is put in order after Ctrl-C is put in order after it."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM, which would end the process where it stands.

    Signals arrive in the main thread; and a handler of somebody else's is left alone.
    """
    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def explain(error: Exception, names: Mapping[str, str] | None = None) -> str | None:
    """One line for an error that a user can do something about; ``None`` for a bug.

    Args:
        names: parameter to option; messages of the library name parameters in backticks, and the line names options.
    """
    if isinstance(error, SinklabError):
        return on_the_line(str(error), names or {})
    if isinstance(error.__cause__, SinklabError):  # a value that the reader of an option refused
        return explain(error.__cause__)
    if isinstance(error, CycloptsError):
        chain = " ".join(("sinklab", *(error.command_chain or ())))
        return f"{' '.join(str(error).split())} (see {chain} --help)"
    if isinstance(error, OSError) and error.errno is not None:
        file = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk{file}; free some, or write elsewhere with --out"
        return f"{error.strerror or type(error).__name__}{file}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory; lower --batch-size or --seq-len, or try --dtype bfloat16"
    return None


def on_the_line(message: str, names: Mapping[str, str]) -> str:
    """A message of the library as one line that names options in the place of parameters."""
    return re.sub(r"`(\w+)`", lambda match: names.get(match[1], match[0]), " ".join(message.split()))
