"""What the terminal shows of ``sinklab measure``: every metric over the layers and heads that give it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinklab.results.run import Result

__all__ = ["display"]


def display(result: Result) -> Iterator[RenderableType]:
    """A row a metric; of one that has a number for each position, the first position is shown."""
    shown = Table(box=None, pad_edge=False)
    for column in ("probe", "metric", "of", "values", "mean", "min", "max", "unit"):
        shown.add_column(column, justify="right" if column in ("values", "mean", "min", "max") else "left")
    for (probe, metric, unit), rows in result.table.groupby(["probe", "metric", "unit"], sort=True):
        at_first = [name for name in ("key_position", "query_position") if rows[name].notna().any()]
        for name in at_first:
            rows = rows[rows[name] == 0]
        # Rows without a layer are the same numbers pooled over the model; where there is nothing else they are shown.
        rows = rows[rows["layer"].notna()] if rows["layer"].notna().any() else rows
        values = rows["value"].astype("float64")
        numbers = (f"{number:.4g}" for number in (values.mean(), values.min(), values.max()))
        keys = "position 0" if at_first else "all positions"
        shown.add_row(str(probe), str(metric), keys, str(len(rows)), *numbers, str(unit))
    yield shown
    if tiers := sorted(result.table["tier"].dropna().unique()):
        yield Text(f"\ntier   {'; '.join(tiers)}")
    if result.folder is not None:
        yield Text(f"\ntable  {result.folder / 'table.parquet'}")
