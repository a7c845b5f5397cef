"""The figure over all claims: of each the effect that decides, its interval and the claimed region, beside what is published.

Effects of one unit share an axis, and effects of different units never do. Drawn as SVG text, so that the same results give the
same bytes on every machine.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal
from xml.sax.saxutils import escape

from sinklab.report.words import number

__all__ = ["KINDS", "VERDICTS", "WIDTH", "Kind", "Mark", "Row", "draw_forest"]

Kind = Literal[
    "toy", "toy, other base", "natural", "natural, other base", "natural, one model", "checkpoint", "checkpoint, one model"
]


@dataclasses.dataclass(frozen=True)
class _Look:
    """Shape, colour and words of a kind of evidence; hollow and dashed where one model is all there is."""

    shape: Literal["circle", "square", "diamond"]
    colour: str
    words: str
    hollow: bool = False


# Colours of Okabe and Ito, which colour-blind readers tell apart; the shapes say the same without them.
KINDS: dict[Kind, _Look] = {
    "toy": _Look("circle", "#0072b2", "toy: trainings on a synthetic language"),
    "toy, other base": _Look("circle", "#56b4e9", "toy, on the base that the source does not have"),
    "natural": _Look("square", "#d55e00", "natural: trainings on text that people wrote"),
    "natural, other base": _Look("square", "#e69f00", "natural, on the base that the source does not have"),
    "natural, one model": _Look("square", "#d55e00", "natural: one model of ours, draws of texts", hollow=True),
    "checkpoint": _Look("diamond", "#007a5a", "checkpoints: models of others, all together"),
    "checkpoint, one model": _Look("diamond", "#007a5a", "checkpoint: one model of others, draws of texts", hollow=True),
}
"""Every kind of evidence, from the one that says least of real models."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """One estimate.

    Attributes:
        of: scale or model, in a few letters.
        interval: 95 %; ``None`` where there is none.
        verdict: in a word or two.
    """

    kind: Kind
    of: str
    middle: float
    interval: tuple[float, float] | None
    verdict: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One effect of one claim, with every estimate of it.

    Attributes:
        says: what is claimed of it.
        unit: that of all numbers of the row.
        more_than, less_than: bounds of the claimed region; infinite where there is none.
        published: what the source reports for it.
    """

    claim: str
    says: str
    unit: str
    more_than: float
    less_than: float
    published: float | None
    marks: tuple[Mark, ...]

    @property
    def shown(self) -> list[float]:
        """The numbers that the axis must reach, whatever the intervals do."""
        bounds = [bound for bound in (self.more_than, self.less_than) if math.isfinite(bound)]
        published = [] if self.published is None else [self.published]
        return [*bounds, *published, *(mark.middle for mark in self.marks)]


WIDTH = 956
TEXT, LEFT, RIGHT, NUMBERS, VERDICTS = 14, 288, 586, 598, 764
"""Where the columns begin: names, the axis and its end, numbers, verdicts; px."""

LINE, LEAST_ROW, PAD, WORDS_LINE = 14, 29, 6, 13
WORDS = 46
"""Characters of a line of what a row claims, of which there are two at most."""

INK, SOFT, RULE, REGION, BOUND = "#1d2126", "#59616b", "#d9dce0", "#e9eef3", "#9aa5b1"
SMALL = 0.5
"""Nats up to which an effect is shown on an axis of its own: beside one of 7, one of 0.05 would be nothing."""

TITLES = {
    "percent": "Rates, in percent",
    "points": "Differences of rates, in points",
    "ratio": "Ratios, on a logarithmic axis",
    "correlation": "Rank correlations",
    "share": "Weights and shares, of 1",
    "nats": f"Losses and entropies in nats, up to {SMALL:g}",
    "large nats": f"Losses and entropies in nats, beyond {SMALL:g}",
}
SHARES = ("weight", "fraction", "of digits")


@dataclasses.dataclass(frozen=True)
class _Axis:
    """From numbers to px."""

    low: float
    high: float
    logarithmic: bool

    def __call__(self, value: float) -> float:
        low, high, at = (self._of(each) for each in (self.low, self.high, min(max(value, self.low), self.high)))
        return LEFT + (RIGHT - LEFT) * (at - low) / (high - low)

    def _of(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def ticks(self) -> list[float]:
        """Round numbers along it."""
        if self.logarithmic:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**decade for decade in decades]
        decade = 10 ** math.floor(math.log10(self.high - self.low) - 1)
        step = next(
            step for step in (decade, 2 * decade, 5 * decade, 10 * decade, 20 * decade) if self.high - self.low <= 8 * step
        )
        first = math.ceil(self.low / step - 1e-9)
        return [round(count * step, 10) for count in range(first, math.floor(self.high / step + 1e-9) + 1)]


def draw_forest(rows: Sequence[Row], title: str, note: str = "") -> str:
    """The figure as SVG text.

    Args:
        rows: in the order in which they stand among those of their unit.
        title: what a screen reader says of it.
        note: a line below the legend.
    """
    parts: list[str] = []
    y = _legend(parts, rows, note)
    for name in _panels(rows):
        y = _panel(parts, name, [row for row in rows if _panel_of(row) == name], y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
        f'aria-label="{escape(title, {chr(34): "&quot;"})}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, '
        f'sans-serif" font-size="11" fill="{INK}">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y:.0f}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _panel_of(row: Row) -> str:
    if row.unit == "nats":
        ends = [end for mark in row.marks if mark.interval is not None for end in mark.interval]
        return "nats" if max(abs(value) for value in (*row.shown, *ends)) <= SMALL else "large nats"
    return "share" if row.unit in SHARES else row.unit


def _panels(rows: Iterable[Row]) -> list[str]:
    """Those that there are: the known ones in their order, then any others."""
    there = {_panel_of(row) for row in rows}
    return [*(name for name in TITLES if name in there), *sorted(there - TITLES.keys())]


def _legend(parts: list[str], rows: Sequence[Row], note: str) -> float:
    """What the marks mean; returns where it ends."""
    there = {mark.kind for row in rows for mark in row.marks}
    y = 24.0
    for count, kind in enumerate(kind for kind in KINDS if kind in there):
        x = TEXT + 8 + 440 * (count % 2)
        if count and not count % 2:
            y += 20
        parts += [*_mark(kind, x, y, None), _text(x + 14, y + 4, KINDS[kind].words)]
    y += 22
    parts += [
        _published(TEXT + 8, y - 7, y + 7),
        _text(TEXT + 22, y + 4, "published value, of another model"),
        f'<rect x="{TEXT + 440}" y="{y - 7}" width="16" height="14" fill="{REGION}"/>',
        _line(TEXT + 440, y - 7, TEXT + 440, y + 7, BOUND, dash="3 2"),
        _text(TEXT + 462, y + 4, "claimed region; bars are 95 % intervals, dashed over texts alone"),
    ]
    if note:
        y += 20
        parts.append(_text(TEXT, y + 4, note, colour=SOFT))
    return y + 14


def _panel(parts: list[str], name: str, rows: Sequence[Row], y: float) -> float:
    """One axis with its rows; returns where it ends."""
    axis = _axis_of(name, rows)
    y += 24
    parts.append(_text(TEXT, y, TITLES.get(name, f"Effects in {name}"), size=13, weight=600))
    y += 8
    top = y
    heights = [max(LEAST_ROW + (WORDS_LINE + 2) * (len(_words(row)) - 1), LINE * len(row.marks) + PAD) for row in rows]
    bottom = top + sum(heights)
    below: list[str] = []
    for tick in axis.ticks():
        x = axis(tick)
        solid = tick == (1 if axis.logarithmic else 0)
        below.append(_line(x, top, x, bottom, "#aeb5bd" if solid else RULE, width=1 if solid else 0.6))
        parts.append(_text(x, bottom + 14, _tick(tick), size=10, colour=SOFT, anchor="middle"))
    regions, drawn = [], []
    for row, height in zip(rows, heights, strict=True):
        left, right = axis(max(row.more_than, axis.low)), axis(min(row.less_than, axis.high))
        regions.append(
            f'<rect x="{left:.1f}" y="{y + 2:.1f}" width="{right - left:.1f}" height="{height - 4:.1f}" fill="{REGION}"/>'
        )
        drawn += [
            _line(axis(bound), y + 2, axis(bound), y + height - 2, BOUND, dash="3 2")
            for bound in (row.more_than, row.less_than)
            if math.isfinite(bound)
        ]
        drawn += _row(row, axis, y, height)
        y += height
        drawn.append(_line(TEXT, y, WIDTH - TEXT, y, "#eef0f2"))
    parts += [*regions, *below, *drawn]
    return bottom + 24


def _row(row: Row, axis: _Axis, y: float, height: float) -> list[str]:
    middle, words = y + height / 2, _words(row)
    name = middle - 3 - (WORDS_LINE / 2 + 1) * (len(words) - 1)
    parts = [_text(TEXT, name, row.claim, size=11.5, weight=600)]
    parts += [_text(TEXT, name + 13.5 + WORDS_LINE * count, line, size=10.5, colour=SOFT) for count, line in enumerate(words)]
    first = middle - LINE * (len(row.marks) - 1) / 2
    if row.published is not None:
        parts.append(_published(axis(row.published), y + 3, y + height - 3))
    for count, mark in enumerate(row.marks):
        at = first + LINE * count
        parts += _mark(mark.kind, axis(mark.middle), at, mark.interval and _ends(mark.interval, axis))
        weight = 600 if mark.verdict in ("reproduced", "not reproduced") else 400
        parts += [
            _text(NUMBERS, at + 3.5, _rounded(mark.middle, mark.interval, row.unit == "ratio"), size=10.5),
            _text(VERDICTS, at + 3.5, f"{mark.of}: {mark.verdict}", size=10.5, weight=weight),
        ]
    return parts


def _ends(interval: tuple[float, float], axis: _Axis) -> tuple[float, float, bool, bool]:
    """Both ends in px, and whether the interval goes on beyond the axis."""
    low, high = interval
    return axis(low), axis(high), low < axis.low, high > axis.high


def _axis_of(name: str, rows: Sequence[Row]) -> _Axis:
    if name == "percent":
        return _Axis(0, 100, False)
    shown = [value for row in rows for value in row.shown]
    ends = [end for row in rows for mark in row.marks if mark.interval is not None for end in mark.interval]
    if name == "ratio":
        # A ratio of 0 has no place on it, and stands at its left end.
        low, high = (of(math.log10(value) for value in shown if value > 0) for of in (min, max))
        ends = [math.log10(end) for end in ends if end > 0]
        low, high = max(min([low, *ends]), low - 0.5), min(max([high, *ends]), high + 0.5)
        return _Axis(10 ** (low - 0.1), 10 ** (high + 0.1), True)
    low, high = min(0.0, *shown), max(0.0, *shown)
    # One interval that is far wider than all else is cut off, with an arrow, rather than that all else is squeezed.
    room = (high - low) / 2 or 1.0
    low, high = max(min([low, *ends]), low - room), min(max([high, *ends]), high + room)
    pad = 0.03 * (high - low)
    return _Axis(low - pad, high + pad, False)


def _mark(kind: Kind, x: float, y: float, ends: tuple[float, float, bool, bool] | None) -> list[str]:
    """An estimate with its interval; ends are px, and whether the interval goes on beyond them."""
    look, parts = KINDS[kind], []
    if ends is not None:
        low, high, more_below, more_above = ends
        parts.append(_line(low, y, high, y, look.colour, width=1.8, dash="4 2.5" if look.hollow else ""))
        for end, more, sign in ((low, more_below, -1), (high, more_above, 1)):
            if more:
                parts.append(f'<path d="M{end - 5 * sign:.1f} {y - 4:.1f}l{7 * sign} 4l{-7 * sign} 4Z" fill="{look.colour}"/>')
            else:
                parts.append(_line(end, y - 3, end, y + 3, look.colour, width=1.4))
    paint = f'fill="{"#ffffff" if look.hollow else look.colour}" stroke="{look.colour if look.hollow else "#ffffff"}" '
    paint += f'stroke-width="{1.8 if look.hollow else 0.8}"'
    if look.shape == "circle":
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.4" {paint}/>')
    elif look.shape == "square":
        parts.append(f'<rect x="{x - 3.9:.1f}" y="{y - 3.9:.1f}" width="7.8" height="7.8" {paint}/>')
    else:
        parts.append(f'<path d="M{x:.1f} {y - 5.4:.1f}l5.4 5.4l-5.4 5.4l-5.4 -5.4Z" {paint}/>')
    return parts


def _published(x: float, top: float, bottom: float) -> str:
    """A black bar with a white edge, so that it shows on whatever it crosses."""
    return (
        f'<rect x="{x - 1.6:.1f}" y="{top:.1f}" width="3.2" height="{bottom - top:.1f}" fill="#000000" stroke="#ffffff" '
        'stroke-width="0.8"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def _text(
    x: float, y: float, text: str, *, size: float = 11, weight: int = 400, colour: str = INK, anchor: str = "start"
) -> str:
    extra = "".join(
        f' {name}="{value}"'
        for name, value, usual in (("font-size", size, 11), ("font-weight", weight, 400), ("fill", colour, INK))
        if value != usual
    )
    extra += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'


def _rounded(middle: float, interval: tuple[float, float] | None, relative: bool) -> str:
    """An estimate to two digits of half its interval, and to four places at most; what counts relatively to three digits.

    A ratio whose interval reaches 0 was not taken on the logarithmic scale, and counts as a difference does.
    """
    if interval is None or (relative and interval[0] > 0):
        return number(middle) + ("" if interval is None else f" [{', '.join(map(number, interval))}]")
    half = (interval[1] - interval[0]) / 2
    places = min(max(1 - math.floor(math.log10(half)), 1), 4) if half else 3
    low, high = (_fixed(end, places) for end in interval)
    return f"{_fixed(middle, places)} [{low}, {high}]"


def _fixed(value: float, places: int) -> str:
    text = f"{value:.{places}f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "−")


def _tick(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def _words(row: Row) -> list[str]:
    """What a row claims, in lines; rows of one claim often differ in their last word, so that few are cut."""
    return textwrap.wrap(row.says, WORDS, max_lines=2, placeholder=" …", break_on_hyphens=False)
