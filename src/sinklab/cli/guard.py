"""The guard: one line for what a user can get wrong, and nothing for bugs, which are to be seen as bugs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

from sinklab.errors import SinklabError
from sinklab.results.folder import system_error
from sinklab.results.progress import SinklabWarning, is_quiet, say

LONGEST_WORD = 400
"""Characters of a word that is shown whole; paths are seldom longer."""
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


@contextlib.contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Say warnings of sinklab behind the block, without the line of code that they come from; none where it fails."""
    held, show = list[str](), warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, SinklabWarning):
            show(message, category, *place, **more)
        elif not is_quiet():
            held.append(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = shown
        yield
    for text in held:
        say(text)


def is_follower() -> bool:
    """Whether this is one of several processes of ``torchrun``, and not the first of its machine, which speaks for all."""
    return os.environ.get("RANK", "0") != "0" and os.environ.get("LOCAL_RANK", "0") != "0"


_ALLOCATOR = re.compile(r"DefaultCPUAllocator|Storage size calculation overflowed|numel: integer multiplication overflow")
"""What PyTorch says, in a bare RuntimeError, of memory on the CPU that cannot be had."""
_ASKED = re.compile(r"you tried to allocate (\d+) bytes")

_TO_DO = {
    errno.ENOSPC: "free some, or write elsewhere",
    errno.EDQUOT: "free some, or write elsewhere",
    errno.EROFS: "write elsewhere",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or write elsewhere",
    errno.EIO: "the disk may be failing, so look at the system's log, and write elsewhere",
    errno.EACCES: "change its permissions, or name another place",
    errno.ENOMEM: "ask for smaller sizes",
}
"""What to do about an error of the operating system; for the others its own words must do."""


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
        said = _missing(error) or _too_many(error) or _one_line(str(error))
        return f"{said} (see {chain} --help)"
    number = system_error(error)
    if number is not None:
        return _of_system(error, number, names)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _ALLOCATOR.search(str(error)):
        return _of_memory(error, names)
    return None


def _of_system(error: Exception, number: int, names: Mapping[str, str] | None) -> str:
    """What the operating system said, of which file, and what to do."""
    file = getattr(error, "filename", None)
    where = f" ({os.fsdecode(file)})" if isinstance(file, (str, bytes)) else ""
    words = "no space left on the disk" if number in (errno.ENOSPC, errno.EDQUOT) else os.strerror(number)
    with_out = " with --out" if _has_option("--out", names) else ""
    advice = _TO_DO.get(number, "").replace("write elsewhere", f"write elsewhere{with_out}")
    return f"{words}{where}{f'; {advice}' if advice else ''}"


def _of_memory(error: Exception, names: Mapping[str, str] | None) -> str:
    """How much memory could not be had, where that is known, and which options take less."""
    sizes = [option for option in ("--batch-size", "--seq-len") if _has_option(option, names)]
    smaller = f"lower {' or '.join(sizes)}, or try --dtype bfloat16" if sizes else "ask for smaller sizes"
    size = _ASKED.search(str(error))
    return f"out of memory{f' at an allocation of {int(size[1]):,} bytes' if size else ''}; {smaller}"


def _has_option(option: str, names: Mapping[str, str] | None) -> bool:
    """Whether the command has an option; of an unknown command it is taken to have it."""
    return names is None or option in names.values()


def _missing(error: CycloptsError) -> str | None:
    """What a line lacks: the value of an option, or what the command is about, with a whole line. ``None`` for other errors."""
    if not isinstance(error, MissingArgumentError) or error.argument is None:
        return None
    if error.keyword is not None:
        return f"{error.keyword} has no value"
    examples = str(error.app.help_epilogue or "") if error.app is not None else ""
    whole = next(
        (line.partition("  (")[0] for line in map(str.strip, examples.splitlines()) if line.startswith("sinklab ")), ""
    )
    return f"{error.argument.name} is missing{f', as in: {whole}' if whole else ''}"


def _too_many(error: CycloptsError) -> str | None:
    """Words that no argument takes, such as the second half of a path with a space. ``None`` for other errors."""
    if not isinstance(error, UnusedCliTokensError) or not error.unused_tokens:
        return None
    words = " ".join(error.unused_tokens)
    return f"{_one_line(words)!r} is more than this command takes; what has spaces goes in quotes"


def on_the_line(message: str, names: Mapping[str, str]) -> str:
    """A message of the library as one line that names options in the place of parameters."""
    return re.sub(r"`(\w+)`", lambda match: names.get(match[1], match[0]), _one_line(message))


def _one_line(message: str) -> str:
    """Without line breaks; of what a user has given by the thousand characters, the beginning."""
    words = (word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD // 2]}…" for word in message.split())
    return " ".join(words)
