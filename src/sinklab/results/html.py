"""Blocks as HTML for pages and notebooks; the classes are those of ``report/assets/report.css``. No script is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup, escape

from sinklab.results.blocks import Bar, Block, Cell, Curves, Facts, Grid, Heading, HeadMap, Say, cell_text, number

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 34
"""Size of a drawing, and the room for what is written at its sides."""

LONG = 60
"""Letters of a cell from which on it is wrapped."""

COLOURS = 6
"""Colours of lines and marks in the style sheet; more lines take them again with another dash."""


def html(blocks: Iterable[Block]) -> Markup:
    """The blocks one after the other; every text is escaped, and commands between backticks become code."""
    draw: dict[type, Callable[..., str]] = {
        Heading: lambda block: f"<h{block.level + 1}>{with_code(block.text)}</h{block.level + 1}>",
        Say: lambda block: f'<p class="{"hint" if block.small else "advice"}">{with_code(block.text)}</p>',
        Facts: _facts,
        Grid: _grid,
        Curves: _curves,
        HeadMap: _head_map,
    }
    return Markup("\n".join(draw[type(block)](block) for block in blocks))


def with_code(text: str) -> str:
    """Escaped text with what one types, `sinklab …` or `--…` between backticks, as code; other backticks may be tokens."""
    return re.sub(r"`((?:sinklab |--)[^`]+)`", r"<code>\1</code>", str(escape(text)))


def _facts(block: Facts) -> str:
    rows = "".join(
        f'<tr><th scope="row">{with_code(label)}</th>{"".join(f"<td>{with_code(cell)}</td>" for cell in cells)}</tr>'
        for label, *cells in block.rows
    )
    return f'<div class="scroll"><table class="answers"><tbody>{rows}</tbody></table></div>'


def _grid(block: Grid) -> str:
    head = "".join(f'<th scope="col"{_side(index, block)}>{with_code(name)}</th>' for index, name in enumerate(block.headings))
    body = "".join(f"<tr>{''.join(_cell(index, cell, block) for index, cell in enumerate(row))}</tr>" for row in block.rows)
    label = f' role="region" aria-label="{escape(block.title)}"' if block.title else ""
    table = (
        f'<div class="scroll" tabindex="0"{label}><table class="policies"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    if block.folded:
        return f"<details><summary>{with_code(block.title)} ({len(block.rows)})</summary>{table}</details>"
    return f"<h4>{with_code(block.title)}</h4>{table}" if block.title else table


def _side(index: int, block: Grid) -> str:
    return "" if index < block.text else ' class="n"'


def _cell(index: int, cell: Cell, block: Grid) -> str:
    text = with_code(cell_text(cell))
    if isinstance(cell, Bar):
        hollow = " below" if cell.size < 0 else ""
        width = 100 * min(1.0, abs(cell.size))
        drawn = (
            f'<svg width="100%" height="10" aria-hidden="true"><rect class="b-{escape(cell.kind)}{hollow}" '
            f'width="{width:.1f}%" height="10" rx="2"/></svg>'
        )
        return f'<td class="bar-cell"><div>{drawn}<span>{text}</span></div></td>'
    if index == 0:
        return f'<th scope="row">{text}</th>'
    prose = ' class="prose"' if index < block.text and len(text) > LONG else ""
    return f"<td{_side(index, block)}{prose}>{text}</td>"


def _curves(block: Curves) -> str:
    scale = math.log10 if block.logarithmic else float
    heights = [scale(y) for line in block.lines.values() for y in line if y is not None and (y > 0 or not block.logarithmic)]
    longest = max(map(len, block.lines.values()), default=0)
    places = list(block.x if block.x is not None else range(longest))
    if not heights or not places:
        return ""
    low, high = min(heights), max(heights)
    x = _onto(min(places), max(places), LEFT, WIDTH - RIGHT)
    y = _onto(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_y_ticks(low, high, y, block.logarithmic), _x_ticks(places, x)]
    if block.mark is not None:
        parts.append(
            f'<line class="born" x1="{x(block.mark):.1f}" x2="{x(block.mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
    for order, (name, line) in enumerate(block.lines.items()):
        known = [
            (x(place), y(scale(value)), value)
            for place, value in zip(places, line, strict=False)
            if value is not None and (value > 0 or not block.logarithmic)
        ]
        points = " ".join(f"{across:.1f},{up:.1f}" for across, up, _ in known)
        dots = "".join(
            f'<circle class="k-audit{order % COLOURS}" cx="{across:.1f}" cy="{up:.1f}" r="2.5">'
            f"<title>{escape(name)}: {number(value)}</title></circle>"
            for across, up, value in known
        )
        halves = zip(places, line, block.errors.get(name, ()), strict=False)
        for place, value, half in halves:
            if value is not None and half is not None:  # an end of an interval may lie outside of the picture
                ends = (max(low, scale(value - half)), min(high, scale(value + half)))
                vertical = f'x1="{x(place):.1f}" x2="{x(place):.1f}" y1="{y(ends[0]):.1f}" y2="{y(ends[1]):.1f}"'
                parts.append(f'<line class="line {_colour(order)}" {vertical}/>')
        parts.append(dots if name in block.errors else f'<polyline class="line {_colour(order)}" points="{points}"/>{dots}')
    keys = "".join(f'<span><i class="{_colour(order)}"></i>{with_code(name)}</span>' for order, name in enumerate(block.lines))
    axis = f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{with_code(block.x_name)}</text>'
    unit = f" <span>{with_code(block.y_name)}</span>" if block.y_name else ""
    return (
        f'<figure class="figure curves"><figcaption>{with_code(block.title)}{unit}</figcaption><p class="keys">{keys}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(block.title)}">{"".join(parts)}{axis}</svg>'
        "</figure>"
    )


def _colour(order: int) -> str:
    turn = order // COLOURS
    return f"k-audit{order % COLOURS}{f' r{turn}' if turn else ''}"


def _onto(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """A linear map of the interval; one point goes to the middle."""
    if high <= low:
        return lambda value: (start + stop) / 2
    return lambda value: start + (stop - start) * (value - low) / (high - low)


def steps(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between two, about ``count`` of them."""
    if high <= low:
        return [low]
    span = high - low
    unit = 10 ** math.floor(math.log10(span / count))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _y_ticks(low: float, high: float, y: Callable[[float], float], logarithmic: bool) -> str:
    if logarithmic:
        whole = range(math.ceil(low), math.floor(high) + 1)
        ticks = [(float(power), f"{10.0**power:,g}") for power in whole[:: max(1, len(whole) // 4)]]
        ticks = ticks if len(ticks) > 1 else [(value, number(10**value)) for value in (low, high)]
    else:
        ticks = [(value, number(value)) for value in steps(low, high)]
    return "".join(
        f'<line class="gridline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{text}</text>'
        for value, text in ticks
    )


def _x_ticks(places: Sequence[float], x: Callable[[float], float]) -> str:
    chosen = places if len(places) <= 8 else [value for value in steps(min(places), max(places), 6)]
    return "".join(
        f'<text x="{x(place):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{number(float(place))}</text>'
        for place in chosen
    )


def _head_map(block: HeadMap) -> str:
    if not block.cells:
        return ""
    layers, heads = block.size
    head = "".join(f'<th scope="col">{layer}</th>' for layer in range(layers))
    body = "".join(
        f'<tr><th scope="row">{row}</th>{"".join(_head(block.cells.get((layer, row))) for layer in range(layers))}</tr>'
        for row in range(heads)
    )
    key = "".join(
        f'<div><dt><i class="l-{escape(kind)}" aria-hidden="true">{escape(letter)}</i>{with_code(kind)}<span>{count}</span>'
        f"</dt><dd>{with_code(meaning)}</dd></div>"
        for kind, letter, count, meaning in block.legend
    )
    return (
        f'<div class="labelled"><div class="scroll" tabindex="0" role="region" aria-label="{escape(block.title)}">'
        f'<table class="label-map{" dense" if layers > 20 else ""}"><caption>{with_code(block.title)}: layers across, heads'
        f" down</caption><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<dl class="label-key">{key}</dl></div>'
    )


def _head(cell: tuple[str, str, str] | None) -> str:
    if cell is None:
        return '<td class="l-none" title="not examined"></td>'
    letter, kind, words = map(escape, cell)
    return f'<td class="l-{kind}" title="{words}"><span aria-label="{words}" role="img">{letter}</span></td>'


def framed(page: str, height: int = 640, finding: str = "") -> str:
    """An inline frame that holds a whole HTML page; it works where notebooks are saved, mailed or shown without a server.

    Args:
        page: the page as text.
        height: of the frame in CSS pixels; a page may change that of its own frame.
        finding: what is shown where frames are left out: in notebooks that are not trusted, and on GitHub.
    """
    # Between single quotes only these two end or change what is between them, and pages have few of either.
    quoted = page.replace("&", "&amp;").replace("'", "&#39;")
    style = f"width: 100%; height: {height}px; border: 0; display: block; position: relative; margin-top: -4em"
    said = f"{escape(finding)} (A page of sinklab: trust this notebook, or run the cell, to see it.)".strip()
    sentence = f'<p style="height: 4em; margin: 0">{said}</p>'  # which the frame covers
    return f'{sentence}<iframe srcdoc=\'{quoted}\' style="{style}" loading="lazy" title="sinklab"></iframe>'
