"""What the terminal shows of ``sinklab denoise``: the finding, and a table of the states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinklab.results.run import Result
from sinklab.results.summaries.denoise import DenoiseSummary
from sinklab.studies.denoise.figure import NAME

__all__ = ["display"]

COLUMNS = {
    "step": "step",
    "masked": "masked %",
    "sink_rate": "heads with a sink %",
    "on_special": "on special %",
    "on_masked": "on masked %",
    "on_text": "on text %",
    "moves": "moves %",
    "vanishes": "vanishes %",
    "loss": "loss (nats)",
}
"""Key of a state to its heading."""


def display(result: Result) -> Iterator[RenderableType]:
    """The finding, the states, what to mind."""
    summary = cast(DenoiseSummary, result.summary)  # of a result of this command
    yield Text(summary["text"])
    yield ""
    table = Table(box=None, pad_edge=False)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    for state in summary["by_step"]:
        table.add_row(*(_cell(name, state[name]) for name in COLUMNS))  # type: ignore[literal-required]  # keys of a state
    yield table
    for note in summary["notes"]:
        yield Text(note)
    if result.folder is not None:
        yield Text(f"\nfigure  {result.folder / NAME}")


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return str(value) if name == "step" else f"{value:.3f}" if name == "loss" else f"{value:.1f}"
