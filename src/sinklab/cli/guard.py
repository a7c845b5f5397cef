"""The guard: turns what a user can get wrong into one line on stderr and an exit status, and lets bugs be seen as bugs."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from sinklab.errors import SinklabError

__all__ = ["INTERRUPTED", "USER_ERROR", "Guarded"]

USER_ERROR = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells expect."""

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What the parser raises; typer has carried its own copy of click's classes since 0.26 and exports only this one's child."""


class Guarded(TyperGroup):
    """A group of commands that ends in ``error: …`` and status 2, never in a page of traceback, when the user can help it.

    Anything else that goes wrong is a bug of ours and is shown whole. ``--traceback`` anywhere on the line, or
    ``SINKLAB_TRACEBACK=1``, shows the rest of a user's error too.
    """

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        show_all = "--traceback" in given or os.environ.get("SINKLAB_TRACEBACK", "") not in ("", "0")
        given = [argument for argument in given if argument != "--traceback"]
        extra["standalone_mode"] = False
        try:
            status = super().main(args=given, prog_name="sinklab", **extra)
        except (typer.Abort, KeyboardInterrupt):
            status = INTERRUPTED
        except Exception as error:
            line = explain(error)
            if line is None:
                raise
            if show_all:
                traceback.print_exc()
            sys.stderr.write(f"error: {line}\n")
            sys.exit(USER_ERROR)
        if status == INTERRUPTED:
            sys.stderr.write("interrupted\n")
        sys.exit(status if isinstance(status, int) else 0)


def explain(error: Exception) -> str | None:
    """One line for an error that a user can do something about; ``None`` for a bug."""
    if isinstance(error, SinklabError):
        # The library names parameters, in backticks; here they are options.
        return re.sub(r"`([a-z_]+)`", lambda match: f"--{match[1].replace('_', '-')}", " ".join(str(error).split()))
    if isinstance(error, UsageError):
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "sinklab"
        return f"{' '.join(error.format_message().split())} (see {where} --help)"  # type: ignore[attr-defined]
    if isinstance(error, OSError) and error.errno is not None:
        place = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk{place}; free some, or write elsewhere with --out"
        return f"{error.strerror or type(error).__name__}{place}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory; lower --batch-size or --seq-len, or try --dtype bfloat16"
    return None
