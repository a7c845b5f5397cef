"""The command line: the same functions as the Python API, with one-line errors; importing it needs no torch."""

from __future__ import annotations

import gc
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``sinklab`` command."""
    wait_without_spinning()
    # Half a million objects that are imported are no garbage, and by default are looked through some seven times meanwhile:
    # a second and a half of the nine that a short command takes.
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    try:
        from sinklab.cli.app import app

        app()
    except KeyboardInterrupt:
        # Ctrl-C before the commands have taken over, while Python is still importing.
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def wait_without_spinning() -> None:
    """Let OpenMP threads that have nothing to do sleep, unless the environment says how they wait.

    By default they spin for milliseconds, and on a machine with other work on its cores they spin in the way of what they wait
    for: a forward of one token of a small model takes thirty times as long. It is read when torch is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="1000")  # GNU's: some microseconds, then sleep
