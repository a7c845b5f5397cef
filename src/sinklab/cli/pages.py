"""The commands ``sinklab compare`` and ``sinklab report``: pages and tables from what audits left behind."""

from __future__ import annotations

from pathlib import Path

from sinklab.cli import output
from sinklab.studies.arguments import AsJson, command

__all__ = ["compare", "report"]


@command
def compare(folders: list[Path], *, out: Path | None = None, as_json: AsJson = False) -> None:
    """Put audits side by side.

    Args:
        folders: Output directories of two or more audits.
        out: Write the comparison as one HTML page too.

    Examples:
        sinklab compare sinklab-audit/embedded-softmax sinklab-audit/embedded-sigmoid --out both.html
    """
    from sinklab.report.compare import comparison_table, format_comparison, write_comparison
    from sinklab.report.data import read_audit
    from sinklab.report.words import verdict

    table = comparison_table(folders)
    page = write_comparison(folders, out) if out is not None else None
    if as_json:
        output.print_json(table.to_dict())
        return
    verdicts = [f"{name}: {verdict(read_audit(folder))}" for name, folder in zip(table.columns, folders, strict=True)]
    output.print_comparison(format_comparison(table), verdicts)
    if page is not None:
        print(f"\npage  {page}")


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
