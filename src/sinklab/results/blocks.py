"""Blocks: what a result says, once, for terminal, page, notebook and Markdown; how numbers, tokens and places are written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import TypeAlias


def counted(number: int, noun: str) -> str:
    """``1 text``, ``2,000 texts``: of a noun whose plural has an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def display_token(token: str) -> str:
    """A token as one line of visible text; byte-level and SentencePiece space marks become spaces."""
    marks = {"Ġ": " ", "▁": " ", "Ċ": "↵", "\n": "↵", "\r": "\\r", "ĉ": "⇥", "\t": "⇥"}
    return "".join(marks.get(letter, letter if letter.isprintable() else "�") for letter in token)


def quote(token: object) -> str:
    """A token between quotation marks, as every sentence, table and page has it."""
    return f"“{display_token(str(token))}”"


def front_name(position: int, count: int) -> str:
    """One of the ``count`` learned tokens that a model puts in front of every text, by its position below ``count``."""
    return "the learned token in front" if count == 1 else f"learned token {position + 1} of {count} in front"


def front_names(count: int) -> list[str]:
    """All of them."""
    return [front_name(position, count) for position in range(count)]


def front_warning(operation: str, count: int) -> str:
    """A sentence where position 0, whose sink rate is shown, holds a learned token and no token of the text; else empty."""
    if not count:
        return ""
    return (
        f"With {operation} position 0 is that of a learned token, whose sink rate this is: the text begins at position {count}."
    )


def head_numbering(attending: Sequence[int], total: int, noun: str = "layer") -> str:
    """How heads are numbered where only some layers have attention, a sentence; empty where all have it, or none.

    Args:
        attending: numbers of the layers with attention, among all, in their order.
        total: how many layers there are.
        noun: what they are called.
    """
    if not 0 < len(attending) < total:
        return ""
    listed = ", ".join(map(str, attending[:6])) + (", …" if len(attending) > 6 else "")
    have, these = ("has", "it alone") if len(attending) == 1 else ("have", "these")
    return (
        f"Of {counted(total, noun)} {len(attending)} {have} attention ({listed}), and heads are numbered by {these}: 0.0 is "
        f"the first head of {noun} {attending[0]}."
    )


NOTHING = "–"
"""Stands for what was not measured or is not a number."""


@dataclass(frozen=True)
class Bar:
    """A number in a table that a page draws as a bar too.

    Attributes:
        value: what is written.
        size: length of the bar, at most 1; of a negative number the bar is hollow.
        kind: name of the style on a page, such as ``"unit"`` or ``"rest"``.
    """

    value: float | str
    size: float
    kind: str = "unit"


Cell: TypeAlias = str | int | float | Bar | None


@dataclass(frozen=True)
class Heading:
    """Begins a section; ``level`` 3 is a part of one."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Say:
    """One sentence: a finding, or with ``small`` a note on how to read what stands above."""

    text: str
    small: bool = False


@dataclass(frozen=True)
class Facts:
    """Labels and what belongs to each; a row without a label goes on with the one above.

    Attributes:
        rows: label and text; several cells stand in columns.
    """

    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        headings: one for each column.
        rows: cells; numbers are written by :func:`number`.
        title: what it is a table of; needed where it is folded.
        folded: hidden behind its title on a page, and left out elsewhere.
        text: how many of the first columns are text, aligned to the left.
        limit: rows that a terminal shows; the others are counted.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    folded: bool = False
    text: int = 1
    limit: int | None = None


@dataclass(frozen=True)
class Curves:
    """Lines over one axis; drawn on pages only.

    Attributes:
        title: what is drawn.
        lines: name to heights, ``None`` where there is none.
        x: places on the axis, by default 0, 1, 2, ….
        x_name: what the axis is.
        y_name: unit of the heights.
        logarithmic: whether equal steps of the height are equal ratios.
        mark: place on the axis that is marked.
        errors: of lines that are samples, half of the interval at each place: they are drawn as points and not as a line.
    """

    title: str
    lines: Mapping[str, Sequence[float | None]]
    x: Sequence[float] | None = None
    x_name: str = ""
    y_name: str = ""
    logarithmic: bool = False
    mark: float | None = None
    errors: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadMap:
    """A letter for every head: layers across, heads down.

    Attributes:
        title: what the letters say.
        cells: (layer, head) to letter, kind (of the legend) and the words for a pointer.
        legend: kind, letter, how many heads are of it, and what it means.
    """

    title: str
    cells: Mapping[tuple[int, int], tuple[str, str, str]]
    legend: Sequence[tuple[str, str, int, str]] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        """Layers and heads of the map."""
        return max(layer for layer, _ in self.cells) + 1, max(head for _, head in self.cells) + 1


Block: TypeAlias = Heading | Say | Facts | Grid | Curves | HeadMap


def number(value: object, digits: int = 3) -> str:
    """A value with ``digits`` significant digits, whole numbers as they are, thousands grouped, an en dash for nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    size = abs(value)
    if isinstance(value, int) or (value.is_integer() and size < 1e6):
        text = f"{int(value):,}"
    elif not math.isfinite(value):
        text = str(value)
    elif size >= 1e6 or size < 1e-3:
        text = f"{value:.{digits - 1}e}"
    else:
        text = f"{_half_up(value, max(0, digits - 1 - math.floor(math.log10(size)))):,f}"
    return text.replace("-", "\u2212")


def percent(value: float | None) -> str:
    """A percentage: ``31.3 %``, ``0.04 %``, ``100 %``; ``0 %`` is exactly nothing."""
    if value is None or math.isnan(value):
        return NOTHING
    text = f"{value:.0f}" if value in (0, 100) else f"{_half_up(float(value), 2 if abs(value) < 1 else 1):f}"
    return f"{text}\u202f%".replace("-", "\u2212")


def _half_up(value: float, places: int) -> Decimal:
    # Python rounds 31.25 to 31.2, a page's script to 31.3; one page must not show both.
    return Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)


def interval(value: object, places: int = 4, sign: str = "+") -> str:
    """``+0.087 [+0.015, +0.171]``: the one way in which a mean with its bounds is written.

    Args:
        value: has ``mean``, ``low`` and ``high`` as attributes or keys; ``None`` for nothing. Without bounds the mean alone.
        places: decimals.
        sign: ``"+"`` for differences, ``""`` for what cannot be negative.
    """
    get = value.get if isinstance(value, Mapping) else lambda name: getattr(value, name, None)
    mean, low, high = (None if value is None else get(name) for name in ("mean", "low", "high"))
    if mean is None:
        return NOTHING
    ends = "" if low is None or high is None else f" [{low:{sign}z.{places}f}, {high:{sign}z.{places}f}]"
    return f"{mean:{sign}z.{places}f}{ends}".replace("-", "\u2212")


def names(values: Sequence[str], most: int = 6) -> str:
    """``a``, ``a and b``, ``a, b and c``; of more than ``most`` the first ones and how many there are besides."""
    if len(values) > most:
        return f"{', '.join(values[:most])} and {len(values) - most} more"
    return " and ".join(filter(None, (", ".join(values[:-1]), *values[-1:])))


def cell_text(cell: Cell) -> str:
    """A cell as it is written."""
    return number(cell.value if isinstance(cell, Bar) else cell)


def markdown(blocks: Iterable[Block]) -> str:
    """GitHub's Markdown; pictures and folded tables are left out."""
    return "\n".join(line for block in blocks for line in _markdown(block))


def plain(text: str) -> str:
    """Text as Markdown shows it: no name of a token or a model is taken for markup, and none begins a line."""
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])|[\\`*~\[\]]", r"\\\g<0>", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield from (f"{'#' * block.level} {plain(block.text)}", "")
    elif isinstance(block, Say):
        yield from (plain(block.text), "")
    elif isinstance(block, Facts):
        label = ""
        for first, *rest in block.rows:
            label = first or label
            yield f"- **{plain(label)}**: {plain(': '.join(filter(None, rest)))}"
        yield ""
    elif isinstance(block, Grid) and not block.folded:
        aligned = ["---" if index < block.text else "---:" for index, _ in enumerate(block.headings)]
        for row in (block.headings, aligned, *block.rows):
            yield f"| {' | '.join(plain(cell_text(cell)).replace('|', '&#124;') for cell in row)} |"
        yield ""
