"""The commands ``sinklab compare`` and ``sinklab report``: pages and tables from what audits left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.file import check_file
from sinklab.results.run import Listing
from sinklab.studies.arguments import OverwriteFile, command

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["compare", "report"]


@command
def compare(folders: list[Path], *, out: Path | None = None, overwrite: OverwriteFile = False) -> Listing:
    """Put audits side by side.

    Args:
        folders: Output directories of two or more audits.
        out: Write the comparison as one HTML page too.

    Examples:
        sinklab compare sinklab-audit/embedded-softmax sinklab-audit/embedded-sigmoid --out both.html
    """
    check_file(out, overwrite)
    from sinklab.report.compare import comparison_table, comparison_warning, format_comparison, write_comparison
    from sinklab.report.data import read_audit
    from sinklab.report.words import verdict

    table = comparison_table(folders)
    page = write_comparison(folders, out, overwrite=overwrite) if out is not None else None

    def display(record: object) -> Iterator[RenderableType]:
        said = [f"{name}: {verdict(read_audit(folder))}" for name, folder in zip(table.columns, folders, strict=True)]
        yield from _side_by_side(format_comparison(table), said)
        warning = comparison_warning(folders)
        if warning:
            yield Text(f"\nwarning  {warning}", style="bold")
        if page is not None:
            yield Text(f"\npage  {page}")

    return Listing(table.to_dict(), display)


def _side_by_side(table: pd.DataFrame, verdicts: Sequence[str]) -> Iterator[RenderableType]:
    """One row a number, one column an audit; then what each audit found, in a sentence."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for name in table.columns:
        shown.add_column(escape(str(name)))
    for row, values in zip(table.index, table.itertuples(index=False), strict=True):
        shown.add_row(escape(str(row)), *(escape(str(value)) for value in values))
    yield shown
    yield from (Text(f"\n{verdict}") for verdict in verdicts)


@command
def report(folder: Path) -> Path:
    """Make report.html again from the table of an audit; needs no model.

    Args:
        folder: Output directory of an audit, or of causes.

    Examples:
        sinklab report sinklab-audit/embedded-softmax
    """
    from sinklab.report.html import write_report

    return write_report(folder)
