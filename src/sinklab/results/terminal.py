"""Blocks in a terminal: wrapped at its width with a hanging indent, tables in lines where they do not fit, answer first."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sinklab.results.blocks import Block, Curves, Facts, Grid, Heading, HeadMap, Say, cell_text

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTEBOOK_WIDTH = 80
"""Columns below a cell of a notebook, which wraps longer lines without their indent."""

PIPE_WIDTH = 200
"""Columns of output that does not go to a terminal; long lines are for the reader's tools to wrap."""

NO_BREAK = "\ue000"
"""Stands for a space between a number and its unit until lines are broken."""

COLOURS = ("yellow", "magenta", "green", "cyan", "blue", "white")
"""Of the kinds of a map of heads, in the order of its legend."""


class Printer(Console):
    """That of rich ends the process as a failure when its reader has left, as head does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_blocks(parts: Iterable[Block | RenderableType]) -> None:
    """Print on standard output; what is no block is a renderable of rich or a line of its markup."""
    # Made for each call, so that it writes to the stdout of the moment (tests and pagers replace it).
    in_cell = not sys.stdout.isatty() and type(sys.stdout).__module__.startswith("ipykernel")
    watched = sys.stdout.isatty() or in_cell
    width = NOTEBOOK_WIDTH if in_cell else None if watched else PIPE_WIDTH
    console, written = Printer(file=sys.stdout, highlight=False, width=width, force_jupyter=False), list[str]()
    for part in parts:
        for drawn in terminal([part]) if isinstance(part, Block) else [part]:
            unbroken = not watched or getattr(drawn, "no_wrap", None) is True
            with console.capture() as captured:
                for piece in fitted(drawn, console):
                    console.print(piece, soft_wrap=unbroken and not isinstance(piece, Table))
            lines = captured.get().replace(NO_BREAK, " ").split("\n")
            written.append("\n".join(line.rstrip(" ") for line in lines))
            if not in_cell:  # below a cell it is one block
                sys.stdout.write(written.pop())
    if written:
        sys.stdout.write("".join(written))


def terminal(blocks: Iterable[Block]) -> Iterator[RenderableType]:
    """What rich prints; pictures and folded tables are left out."""
    for block in blocks:
        if isinstance(block, Heading):
            yield Text(f"\n{block.text}" if block.level == 2 else block.text, style="bold")
        elif isinstance(block, Say):
            yield Text(_plain(block.text), style="dim" if block.small else "")
        elif isinstance(block, Facts):
            yield _facts(block)
        elif isinstance(block, HeadMap):
            yield from _head_map(block)
        elif isinstance(block, Grid) and not block.folded:
            yield from _grid(block)
        else:
            assert isinstance(block, (Curves, Grid))


def _plain(text: str) -> str:
    # Nobody who searches for "16 %" types the narrow space of pages; rich would break a line at any space.
    return text.replace("\u202f", NO_BREAK)


def _facts(block: Facts) -> Table:
    """Labels in a column, and what is said of each wrapped beside it."""
    table = Table.grid(padding=(0, 2))
    columns = max(len(row) for row in block.rows)
    table.add_column(no_wrap=True)
    for index in range(1, columns):
        table.add_column(no_wrap=index < columns - 1)
    for row in block.rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    return table


def _grid(block: Grid) -> Iterator[RenderableType]:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for index, heading in enumerate(block.headings):
        table.add_column(Text(_plain(heading)), justify="left" if index < block.text else "right")
    shown = block.rows if block.limit is None else block.rows[: block.limit]
    for row in shown:
        table.add_row(*(Text(_plain(cell_text(cell))) for cell in row))
    if block.title:
        yield Text(_plain(block.title), style="bold")
    yield table
    if len(shown) < len(block.rows):
        yield Text(f"and {len(block.rows) - len(shown):,} more", style="dim")


def _head_map(block: HeadMap) -> Iterator[RenderableType]:
    if not block.cells:
        return
    colour = {kind: COLOURS[index % len(COLOURS)] for index, (kind, *_) in enumerate(block.legend)}
    layers, heads = block.size
    yield Text(f"{block.title} (layers across, heads down)", style="bold")
    for head in range(heads):
        row = Text(f"{head:>3} ")
        for layer in range(layers):
            letter, kind, _ = block.cells.get((layer, head), ("·", "", ""))
            row.append(letter, style=colour.get(kind, "dim"))
        yield row
    for kind, letter, count, meaning in block.legend:
        entry = Table.grid(padding=(0, 2))
        entry.add_column(no_wrap=True)
        entry.add_row(Text.assemble((f"{letter} ", colour[kind]), f"{kind} {count}"), Text(meaning, style="dim"))
        yield entry


def fitted(part: RenderableType, console: Console) -> Iterator[RenderableType]:
    """A part as it fits on a console; nothing of a table is cut off, and what is no table stays as it is."""
    if isinstance(part, (str, Text)) and console.width < PIPE_WIDTH and not getattr(part, "no_wrap", None):
        for line in _text(part).split("\n", allow_blank=True):
            yield from _hanging(line, console)
        return
    if not isinstance(part, Table) or not part.show_header:
        yield part
        return
    wide = console.options.update(width=10**6)
    if Measurement.get(console, wide, part).maximum <= console.width or _narrowed(part, console):
        yield part
    else:
        yield from _as_lines(part)


def _hanging(line: Text, console: Console) -> Iterator[Text]:
    """A line that is too long goes on below the text: behind what it is indented by, and behind a name with two blanks."""
    begins = re.match(r" *(?:\S+ {2,})?", line.plain)
    assert begins is not None
    name, text = line[: begins.end()], line[begins.end() :]
    if line.cell_len <= console.width or not 2 * begins.end() < console.width:
        yield line
        return
    for number, piece in enumerate(text.wrap(console, console.width - begins.end())):
        yield Text.assemble(" " * begins.end() if number else name, piece)


def _narrowed(table: Table, console: Console) -> bool:
    """Set widths with which cells wrap between words; false where there is no room for the longest word of each column."""
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
    numbers = [index for index, column in enumerate(table.columns) if column.justify == "right"]
    if sum(widths) + sum(natural[index] - widths[index] for index in numbers) <= room:  # numbers stay whole, texts wrap
        widths = [natural[index] if index in numbers else width for index, width in enumerate(widths)]
    for _ in range(room - sum(widths)):  # to the column that lacks most
        lacks = [most - width for most, width in zip(natural, widths, strict=True)]
        widths[lacks.index(max(lacks))] += 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    return True


def _as_lines(table: Table) -> Iterator[RenderableType]:
    """Every row as its first cell, and below it a line for each other cell that is not empty."""
    headers = [_text(column.header) for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    for count, (first, *others) in enumerate(rows):
        heading = _text(first)
        heading.stylize("bold")
        yield Text("\n") + heading if count else heading
        for header, cell in zip(headers[1:], map(_text, others), strict=True):
            if cell.plain.strip():
                yield Padding(Text.assemble(header, ": " if header.plain.strip() else "", cell), (0, 0, 0, 2))


def _text(cell: RenderableType) -> Text:
    return cell.copy() if isinstance(cell, Text) else Text.from_markup(str(cell))
