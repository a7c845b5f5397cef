"""The commands ``sinklab compare``, ``index`` and ``report``: pages and tables from what runs left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.results.blocks import Block, Facts, Grid, Say
from sinklab.results.file import check_file
from sinklab.results.run import Listing, Progress, silent
from sinklab.studies.arguments import OverwriteFile, command

if TYPE_CHECKING:
    from sinklab.report.runs import IndexedRun

MOST_SHOWN = 40
"""Runs that the terminal lists, newest first; the page and ``--json`` have all."""

__all__ = ["compare", "index", "report"]


@command
def compare(folders: list[Path], *, out: Path | None = None, overwrite: OverwriteFile = False) -> Listing:
    """Put audits side by side.

    Prints one table of their numbers and settings, and the finding of each.

    Args:
        folders: Output directories of two or more runs of 'sinklab audit'.
        out: Write the comparison as one HTML page too.

    Examples:
        sinklab compare sinklab-audit/embedded-softmax sinklab-audit/embedded-sigmoid --out both.html
    """
    check_file(out, overwrite)
    from sinklab.studies.audit.compare import (
        comparison_findings,
        comparison_table,
        comparison_warning,
        format_comparison,
        write_comparison,
    )

    table = comparison_table(folders)
    page = write_comparison(folders, out, overwrite=overwrite) if out is not None else None

    def display(record: object) -> Iterator[Block]:
        shown = format_comparison(table)
        yield Grid(["", *shown.columns], [[row, *shown.loc[row]] for row in shown.index])
        yield from map(Say, comparison_findings(folders))
        if warning := comparison_warning(folders):
            yield Facts([("warning", warning)])
        if page is not None:
            yield Facts([("page", str(page))])

    return Listing(table.to_dict(), display)


@command
def index(folder: Path, *, out: Path | None = None, watch: float | None = None, progress: Progress | None = None) -> Listing:
    """Make one page over all runs below a folder, to filter and compare them, and to watch trainings.

    The page is one file that opens offline. The next time it is replaced; a file that is no page of sinklab is not.

    Args:
        folder: A directory that holds runs of any command, at any depth.
        out: The page; ``index.html`` in the folder by default.
        watch: Make the page again every so many seconds until interrupted, and let the browser read it again as often.

    Examples:
        sinklab index .
        sinklab index runs --watch 30
    """
    from sinklab.report.index import write_index

    def made(shown: Progress | None) -> tuple[Path, list[IndexedRun]]:
        return write_index(folder, out, refresh=watch, progress=shown or silent)

    page, runs = made(progress)
    if watch is not None:
        print(f"page  {page}, made again every {watch:g} seconds; Ctrl-C ends it", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(watch)
                page, runs = made(None)

    def display(record: list[dict[str, Any]]) -> Iterator[Block]:
        rows = [[run["folder"], run["kind"], run["status"], run["created"][:16].replace("T", " ")] for run in record]
        yield Grid(["run", "command", "status", "began (UTC)"], rows, text=4, limit=MOST_SHOWN)
        yield Facts([("page", str(page))])

    return Listing([dataclasses.asdict(run) for run in runs], display)


@command
def report(folder: Path) -> Path:
    """Make report.html again from the files of an audit; needs no model.

    Args:
        folder: Output directory of 'sinklab audit', 'causes' or 'origin'; runs of other commands have no page.

    Examples:
        sinklab report sinklab-audit/embedded-softmax
    """
    from sinklab.studies.audit.page import write_report

    return write_report(folder)
