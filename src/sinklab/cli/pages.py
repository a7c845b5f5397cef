"""The commands ``sinklab compare`` and ``report``: pages and tables from what runs left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sinklab.results.blocks import Block, Facts, Grid, Say
from sinklab.results.file import check_file
from sinklab.results.run import Listing
from sinklab.studies.arguments import OverwriteFile, command

__all__ = ["compare", "report"]


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
    from sinklab.studies.audit.compare import Comparison

    comparison = Comparison(folders)
    page = comparison.write(out, overwrite=overwrite) if out is not None else None

    def display(record: object) -> Iterator[Block]:
        shown = comparison.as_text()
        yield Grid(["", *shown.columns], [[row, *shown.loc[row]] for row in shown.index])
        yield from map(Say, comparison.findings)
        if comparison.warning:
            yield Facts([("warning", comparison.warning)])
        if page is not None:
            yield Facts([("page", str(page))])

    return Listing(comparison.table.to_dict(), display)


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
