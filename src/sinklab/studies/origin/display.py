"""What the terminal shows of ``sinklab origin``: what was found in words, and a table of the edits of every place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinklab.report.origin import HEADINGS, edit_rows, heads_line, origin_title
from sinklab.results.run import Result
from sinklab.results.summaries.origin import OriginSummary

__all__ = ["display"]


def display(result: Result) -> Iterator[RenderableType]:
    """Each place with its verdict and its edits."""
    summary = cast(OriginSummary, result.summary)  # of a result of this command
    for origin in summary["origins"]:
        yield f"[bold]{origin_title(origin)}[/bold]"
        yield Text(origin["verdict"])
        if origin["edits"]:
            table = Table(box=None, pad_edge=False)
            for heading in HEADINGS:
                table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
            for row in edit_rows(origin):
                table.add_row(*row)
            yield table
            if line := heads_line(origin):
                yield Text(line)
        for weight in origin["weights"]:
            yield Text(
                f"{weight['role']}  {weight['parameter']}{weight['part']}  norm {weight['norm']:.3g}, "
                f"{weight['times_median']:.3g} times the median; largest {weight['value']:.3g} at {weight['channel']} "
                f"(number {weight['rank']} of the matrix)"
            )
        yield ""
    if summary["origins"] and summary["loss"] is not None:
        yield Text(f"loss of the model as it is  {summary['loss']:.3f} nats")
    for note in summary["notes"]:
        yield Text(note)
    if result.folder is not None:
        yield Text(f"report  {result.folder / 'report.html'}")
