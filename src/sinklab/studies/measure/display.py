"""What the terminal shows of ``sinklab measure``: every metric over the layers and heads that give it."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from sinklab.results.blocks import Block, Cell, Facts, Grid
from sinklab.results.run import Result

__all__ = ["display"]


def display(result: Result) -> Iterator[Block]:
    """A row a metric, and of an encoder–decoder one for each part, whose numbers have no mean in common.

    Of a metric that has a number for each position the first position is shown, of one that has some, such as the positions of
    the largest values of a layer, all that have one.
    """
    parts = ["part"] if result.table["part"].notna().any() else []
    shown: list[list[Cell]] = []
    for (probe, metric, unit, part), rows in result.table.groupby(["probe", "metric", "unit", "part"], sort=True, dropna=False):
        keys = "all positions"
        for name in ("key_position", "query_position"):
            if rows[name].notna().any():
                rows, keys = (rows[rows[name] == 0], "position 0") if _has_each(rows, name) else (rows, "some positions")
        # Rows without a layer are the same numbers pooled over the model; where there is nothing else they are shown.
        rows = rows[rows["layer"].notna()] if rows["layer"].notna().any() else rows
        values = rows["value"].astype("float64")
        mean, least, most = (f"{number:.4g}" for number in (values.mean(), values.min(), values.max()))
        if unit == "index":  # between two channels there is none
            mean = "–"
        of_part = ["" if pd.isna(part) else str(part)] if parts else []
        shown.append([str(probe), str(metric), *of_part, keys, str(unit), len(rows), mean, least, most])
    headings = ["probe", "metric", *parts, "of", "unit", "values", "mean", "min", "max"]
    yield Grid(headings, shown, text=4 + len(parts))
    facts = [("tier", "; ".join(sorted(result.table["tier"].dropna().unique())))]
    facts += [("table", "" if result.folder is None else str(result.folder / "table.parquet"))]
    if facts := [fact for fact in facts if fact[1]]:
        yield Facts(facts)


def _has_each(rows: pd.DataFrame, name: str) -> bool:
    """Whether there is a number for each position from the first on, and not for the largest few alone."""
    positions = rows[rows[name].notna()].groupby(["module", "layer", "head"], dropna=False)[name]
    return bool((positions.nunique() == positions.max() + 1).all())
