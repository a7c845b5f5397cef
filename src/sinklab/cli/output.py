"""What the commands print: plain text when piped, colour and progress on a terminal; results on stdout, the rest on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from sinklab.cli.guard import INTERRUPTED, TERMINATED, on_the_line
from sinklab.results.run import Listing, Result

__all__ = ["print_result"]

STATUSES = {"diverged": 3, "stopped": INTERRUPTED}
"""What became of a training to the exit status of its command, unless SIGTERM has stopped it."""


def print_result(result: object, as_json: bool = False, names: Mapping[str, str] | None = None) -> int:
    """Show what a command returned, and give the exit status: that of :data:`STATUSES`, or 1 if parts failed (on stderr).

    Of the processes of ``torchrun`` the first one speaks.

    Args:
        names: parameter to option, as what failed names them.
    """
    if isinstance(result, Result):
        status = STATUSES.get(str(result.summary.get("status")), 0)
        status = TERMINATED if result.record.get("stopped_by") == "SIGTERM" else status
        if os.environ.get("RANK", "0") != "0":
            return status
        if as_json:
            sys.stdout.write(result.to_json())
        else:
            result.show()
        errors = result.summary.get("errors") or []
        for error in errors:
            sys.stderr.write(f"failed: {on_the_line(error, names or {})}\n")
        return 1 if errors else status
    if isinstance(result, Listing):
        if as_json:
            sys.stdout.write(result.to_json())
        else:
            result.show()
    elif result is not None:
        sys.stdout.write(f"{result}\n")
    return 0
