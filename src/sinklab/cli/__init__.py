"""The command line: the same functions as the Python API, with one-line errors; importing it needs no torch."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``sinklab`` command."""
    try:
        from sinklab.cli.app import app

        app()
    except KeyboardInterrupt:
        # Ctrl-C before the commands have taken over, while Python is still importing.
        sys.stderr.write("interrupted\n")
        sys.exit(130)
