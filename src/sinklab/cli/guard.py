"""The guard: one line for what a user can get wrong, and nothing for bugs, which are to be seen as bugs."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping

from cyclopts import CycloptsError

from sinklab.errors import SinklabError

__all__ = ["INTERRUPTED", "USER_ERROR", "explain"]

USER_ERROR = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells expect."""


def explain(error: Exception, names: Mapping[str, str] | None = None) -> str | None:
    """One line for an error that a user can do something about; ``None`` for a bug.

    Args:
        names: parameter to option; messages of the library name parameters in backticks, and the line names options.
    """
    if isinstance(error, SinklabError):
        known = names or {}
        return re.sub(r"`(\w+)`", lambda match: known.get(match[1], match[0]), " ".join(str(error).split()))
    if isinstance(error.__cause__, SinklabError):  # a value that the reader of an option refused
        return explain(error.__cause__)
    if isinstance(error, CycloptsError):
        chain = " ".join(("sinklab", *(error.command_chain or ())))
        return f"{' '.join(str(error).split())} (see {chain} --help)"
    if isinstance(error, OSError) and error.errno is not None:
        place = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk{place}; free some, or write elsewhere with --out"
        return f"{error.strerror or type(error).__name__}{place}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory; lower --batch-size or --seq-len, or try --dtype bfloat16"
    return None
