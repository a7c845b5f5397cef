"""What the terminal shows of ``sinklab pathways``: one table of means, a paragraph, and where the rest lies."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.run import Result
from sinklab.studies.pathways.columns import COLUMNS

__all__ = ["display"]


def display(result: Result) -> Iterator[RenderableType]:
    """Means alone, one line a column, so that twelve operations fit; intervals are in pathways.md."""
    rows = result.summary["rows"]
    shown = Table(box=None, pad_edge=False)
    shown.add_column("mean over seeds")
    for row in rows:
        shown.add_column(escape(row["label"]), justify="right")
    shown.add_row("low-distortion", *("reference" if number == 0 else row["low_distortion"] for number, row in enumerate(rows)))
    answers = [row["beside_softmax"] for row in rows]
    shown.add_row("loss beside softmax", *("–" if answer is None else answer["answer"] for answer in answers))
    for column in COLUMNS:
        numbers = [row["numbers"].get(column.name) for row in rows]
        if any(numbers):
            cells = ("–" if number is None else column.written(number["mean"]) for number in numbers)
            shown.add_row(f"{column.heading} ({column.metric.unit})", *cells)
    yield shown
    yield Text(f"\n{result.summary['paragraph']}")
    for about, text in result.summary["statements"].items():
        yield f"\n[bold]{about}[/bold]  {escape(text)}"
    if result.folder is not None:
        yield Text(f"\nplot   {result.folder / 'pareto.svg'}\ntable  {result.folder / 'table.parquet'}")
