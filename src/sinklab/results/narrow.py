"""Tables on narrow terminals: cells wrap between words while words fit, else every row becomes a few lines.

Columns that must not wrap keep the width of their longest cell.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["fitted"]


def fitted(part: RenderableType, console: Console) -> Iterator[RenderableType]:
    """A part of an answer as it fits on a console; nothing of a table is cut off. What is no table stays as it is."""
    if not isinstance(part, Table):
        yield part
        return
    wide = console.options.update(width=10**6)
    if Measurement.get(console, wide, part).maximum <= console.width:
        yield part
        return
    if _narrow(part, console):
        yield part
    else:
        yield from _as_lines(part)


def _narrow(table: Table, console: Console) -> bool:
    """Set widths with which cells wrap between words and columns that must not wrap are whole; false where there is no room."""
    wide = console.options.update(width=10**6)
    measured = [
        [Measurement.get(console, wide, _text(cell)) for cell in (column.header, *column.cells)] for column in table.columns
    ]
    widths = [
        max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
        for column, cells in zip(table.columns, measured, strict=True)
    ]
    room = console.width - 2 * (len(widths) - 1)  # two spaces between columns
    if sum(widths) > room:
        return False
    natural = [max(cell.maximum for cell in cells) for cells in measured]
    for _ in range(room - sum(widths)):  # to the column that lacks most
        lacks = [most - width for most, width in zip(natural, widths, strict=True)]
        widths[lacks.index(max(lacks))] += 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    return True


def _as_lines(table: Table) -> Iterator[Text]:
    """Every row as its first cell, and below it a line for each other cell that is not empty."""
    headers = [_text(column.header) for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    for number, (first, *others) in enumerate(rows):
        heading = _text(first)
        heading.stylize("bold")
        yield Text("\n") + heading if number else heading
        for header, cell in zip(headers[1:], map(_text, others), strict=True):
            if cell.plain.strip():
                yield Text.assemble("  ", header, ": " if header.plain.strip() else "", cell)


def _text(cell: RenderableType) -> Text:
    return cell.copy() if isinstance(cell, Text) else Text.from_markup(str(cell))
