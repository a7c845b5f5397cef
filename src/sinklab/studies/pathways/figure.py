"""The Pareto plot: held-out loss against distortion, with intervals over seeds, the pathways that no other beats connected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sinklab.results.file import write_image
from sinklab.studies.pathways.judging import ON_THE_PLOT, Row, Summary
from sinklab.studies.pathways.operations import REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "draw_panels", "write_figure", "write_panels"]

COLOURS = {"yes": "#009e73", "no": "#d55e00", "undecided": "#8c959f", "reference": "#000000"}
"""Of Okabe and Ito, and grey; markers say the same."""

MARKERS = {"yes": "o", "no": "s", "undecided": "D", "reference": "*"}

LEGEND = {"yes": "low-distortion", "no": "not low-distortion", "undecided": "undecided", "reference": "reference"}

WINDOW = "loss by a window without sinks"

LINEAR = 0.01
"""Nats below which the axis of distortion is linear; above, it is logarithmic."""

TICKS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Nats that the axis of distortion names, as far as it reaches: powers of ten alone may leave it with a single number."""


def draw(rows: Sequence[Row], title: str, *, natural: bool = False) -> Figure:
    """The plot of the operations that have both numbers; lower is better on both axes.

    Args:
        natural: the text is natural, so that the distortion counts what the first tokens give back in a window.
    """
    return draw_panels([(title, rows)], natural=natural)


def draw_panels(panels: Sequence[tuple[str, Sequence[Row]]], *, natural: bool = False) -> Figure:
    """The same of several comparisons side by side, on axes that they share, each with its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2 * len(panels), 5.2), layout="constrained", dpi=130)
    for axes, (title, rows) in zip(
        figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0], panels, strict=True
    ):
        axes.set_title(title, fontsize=10)
        _draw_points(axes, [row for row in rows if row.point is not None])
        axes.set_ylabel(f"distortion: {'worth of first tokens' if natural else WINDOW} and loss by int8, nats")
    for axes, (_, rows) in zip(figure.axes, panels, strict=True):  # when the limits are those of all panels
        _write_labels(axes, rows)
    return figure


def _draw_points(axes: Axes, shown: Sequence[Row]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.6)
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda nats, _: f"{nats:g}"))
    named: set[str] = set()
    for row in shown:
        kind = "reference" if row.label == REFERENCE else row.answer
        x, y = row.point or (math.nan, math.nan)
        x_error, y_error = (_around(row.numbers[name]) for name in ON_THE_PLOT)
        if y_error is not None:  # distortion is counted from 0 on, so its interval ends there too
            y_error = [[max(0.0, min(below, y)) for below in y_error[0]], y_error[1]]
        axes.errorbar(
            x, y, xerr=x_error, yerr=y_error, color=COLOURS[kind], marker=MARKERS[kind],
            markersize=11 if kind == "reference" else 6, elinewidth=0.8, alpha=0.9, linestyle="none",
            label=None if kind in named else LEGEND[kind],
        )  # fmt: skip
        named.add(kind)
    best = sorted(row.point for row in shown if row.best and row.point is not None)
    if best:
        axes.plot(*zip(*best, strict=True), color="#57606a", linewidth=1.2, linestyle="--", zorder=0, label="non-dominated")
    axes.set_ylim(bottom=-0.1 * LINEAR)
    axes.set_xlabel("held-out loss, nats per token (lower is better)")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if shown:
        # Below: intervals may reach any corner of the plot.
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5)


def _around(number: Summary) -> list[list[float]] | None:
    """The interval of a number as what lies below and above it."""
    if number.low is None or number.high is None:
        return None
    return [[number.mean - number.low], [number.high - number.mean]]


def _write_labels(axes: Axes, shown: Sequence[Row]) -> None:
    """Names beside the points; of points that lie close to each other, one below the other, with a thin line to its point."""
    figure = cast("Figure", axes.figure)
    figure.draw_without_rendering()
    points = [(*row.point, row.label) for row in shown if row.point is not None]
    pixels = sorted((*axes.transData.transform((x, y)), x, y, label) for x, y, label in points)
    taken: list[tuple[float, float]] = []
    height = 9.5 * figure.dpi / 72
    for across, up, x, y, label in pixels:
        width = 5.0 * len(label) * figure.dpi / 72
        free = next(
            step
            for distance in range(40)
            for step in (distance, -distance)
            if all(abs(across - a) > width or abs(up + step * height - b) > 0.95 * height for a, b in taken)
            and (up + step * height > axes.bbox.y0 or distance > 20)
        )
        taken.append((across, up + free * height))
        axes.annotate(
            label, (x, y), xytext=(9, free * 9.5 - 3), textcoords="offset points", fontsize=7.5,
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#8c959f"} if free else None,
        )  # fmt: skip


def write_figure(rows: Sequence[Row], title: str, path: Path, *, natural: bool = False) -> None:
    """Draw to ``path``; the suffix decides the format."""
    write_image(draw(rows, title, natural=natural), path)


def write_panels(panels: Sequence[tuple[str, Sequence[Row]]], path: Path, *, natural: bool = False) -> None:
    """Draw several comparisons side by side to ``path``."""
    write_image(draw_panels(panels, natural=natural), path)
