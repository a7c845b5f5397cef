"""The figure of a claim: for every part the numbers of single seeds, and their effect against the region that is claimed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pandas as pd

from sinklab.results.file import write_image
from sinklab.results.naming import counted
from sinklab.results.summaries.claims import ClaimPart, ClaimRecord
from sinklab.results.table import read_run, read_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["VERDICT_COLOURS", "draw_claim", "write_claim_figure"]

VERDICT_COLOURS = {
    "reproduced": "#2c6e49",
    "not reproduced": "#b3261e",
    "holds for this model": "#2c6e49",
    "does not hold for this model": "#b3261e",
    "agrees with the proof": "#2c6e49",
    "contradicts the proof": "#b3261e",
    "inconclusive": "#8a5a06",
    "not tested at this scale": "#59616b",
    "not applicable": "#59616b",
}
"""Verdict to its colour on a light page; it is never said by colour alone."""

INK, SOFT, REGION, POINT = "#1d2126", "#59616b", "#d9e8df", "#4a6a86"
INCHES = (10.0, 0.28)
"""Width of the figure, and height of one condition in it; at 100 dots per inch it is 1000 px wide."""


def write_claim_figure(folder: Path) -> Path:
    """Draw ``figure.png`` (1000 px wide) from ``table.parquet`` and ``run.json`` of a folder; returns its path.

    Raises:
        InputError: one of the two is not there or is damaged.
    """
    record, table = read_run(folder), read_table(folder / "table.parquet")
    figure = draw_claim(cast(ClaimRecord, record), table)  # of a folder that a claim has written
    path = folder / "figure.png"
    # No date and no version in the file: the same numbers give the same bytes.
    write_image(figure, path, dpi=100, metadata={"Software": None})
    return path


def draw_claim(record: ClaimRecord, table: pd.DataFrame) -> Figure:
    """The figure of a claim.

    Args:
        record: ``run.json`` of the claim.
        table: its long table, one row per seed, condition (``model``) and metric.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = record["parts"]
    table = table[table["seed"].isin(record["seeds"])]  # what is lent to premises is of no part
    series = [_series(part, table) for part in parts]
    rows = [max(3, len(numbers_of)) for numbers_of in series]
    width, line = INCHES
    heights = [line * number + 1.0 for number in rows]
    title = textwrap.wrap(record["statement"], 105)
    head = 0.24 * len(title) + 0.55
    figure = Figure(figsize=(width, sum(heights) + head), facecolor="white")
    FigureCanvasAgg(figure)
    total = sum(heights) + head
    top = 1 - 0.14 / total
    figure.text(0.02, top, "\n".join(title), va="top", fontsize=11, color=INK, linespacing=1.35)
    verdict = record["verdict"]
    on = {"bos": ", BOS in rows", "no-bos": ", no BOS"}.get(record.get("base") or "", "")
    below = f"{record['reference']} · scale {record['scale']}{on} · {counted(len(record['seeds']), 'seed')}"
    at = top - (0.24 * len(title) + 0.05) / total
    figure.text(0.02, at, verdict, va="top", fontsize=10, color=VERDICT_COLOURS[verdict], weight="bold")
    figure.text(0.98, at, below, va="top", ha="right", fontsize=9, color=SOFT)
    used = head
    for part, numbers_of, height in zip(parts, series, heights, strict=True):
        bottom = 1 - (used + height - 0.47) / total
        tall = (height - 1.0) / total
        numbers = figure.add_axes((0.27, bottom, 0.33, tall))
        effect = figure.add_axes((0.66, bottom, 0.32, tall))
        _draw_numbers(numbers, numbers_of)
        _draw_effect(effect, part)
        words = "\n".join(textwrap.wrap(f"{part['says']} – {part['verdict']}", 125))
        colour = VERDICT_COLOURS[part["verdict"]]
        figure.text(0.02, bottom + tall + 0.10 / total, words, va="bottom", fontsize=9.5, color=colour)
        used += height
    return figure


def _series(part: ClaimPart, table: pd.DataFrame) -> list[tuple[str, list[float], str]]:
    """What the effect of a part is computed from: label, values of the seeds and unit, in the order of the table."""
    needed = {tuple(pair) for pair in part["needs"]}
    metrics = {metric for _, metric in needed}
    values_of: dict[tuple[str, str], tuple[list[float], str]] = {}
    for label, metric, value, unit in zip(table["model"], table["metric"], table["value"], table["unit"], strict=True):
        if (label, metric) in needed:
            values_of.setdefault((label, metric), ([], str(unit)))[0].append(float(value))
    for label, metric in sorted(needed - values_of.keys()):
        values_of[label, metric] = ([], "")
    named = len(metrics) > 1
    return [
        (f"{label}: {metric}" if named else str(label), values, f"{metric} in {unit}" if not named else unit)
        for (label, metric), (values, unit) in values_of.items()
    ]


def _draw_numbers(axes: Axes, series: Sequence[tuple[str, list[float], str]]) -> None:
    """One line per condition, a point per seed and a tick at their mean."""
    for row, (_, values, _unit) in enumerate(series):
        if values:
            axes.plot(values, [row] * len(values), "o", color=POINT, markersize=5, alpha=0.75, markeredgewidth=0)
            axes.plot([float(np.mean(values))] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=1.4)
        else:
            axes.text(
                0.5, row, "no number", transform=axes.get_yaxis_transform(), ha="center", va="center", color=SOFT, fontsize=8
            )
    labels = [textwrap.shorten(label, 40, placeholder="…") for label, _, _ in series]
    axes.set_yticks(range(len(series)), labels, fontsize=8.5)
    axes.set_ylim(len(series) - 0.4, -0.6)
    units = dict.fromkeys(unit for _, _, unit in series if unit)
    axes.set_xlabel(", ".join(units), fontsize=8.5, color=SOFT)
    axes.grid(axis="y", color="#ececE6", linewidth=0.8)
    axes.margins(x=0.08)
    _tidy(axes)


def _draw_effect(axes: Axes, part: ClaimPart) -> None:
    """The effect of every seed, its interval, and the claimed region in green."""
    values = [value for value in part["by_seed"].values() if value is not None]
    low, high = part["more_than"], part["less_than"]
    shown = [*values, *(part["interval"] or ()), *(bound for bound in (low, high) if bound is not None)]
    left, right = min(shown), max(shown)
    pad = 0.12 * (right - left or abs(right) or 1.0)
    axes.set_xlim(left - pad, right + pad)
    axes.axvspan(left - pad if low is None else low, right + pad if high is None else high, color=REGION, linewidth=0)
    for bound in (low, high):
        if bound is not None:
            axes.axvline(bound, color="#2c6e49", linewidth=1, linestyle=(0, (3, 2)))
    if left - pad < 0 < right + pad:
        axes.axvline(0, color=SOFT, linewidth=0.7)
    axes.plot(values, [0.3] * len(values), "o", color=POINT, markersize=5, alpha=0.75, markeredgewidth=0)
    if part["interval"] is not None:
        axes.plot(part["interval"], [-0.3, -0.3], color=INK, linewidth=2)
    if part["mean"] is not None:
        axes.plot([part["mean"]], [-0.3], "D", color=INK, markersize=5)
    axes.set_ylim(-1, 1)
    axes.set_yticks([])
    axes.set_xlabel(f"effect in {part['unit']}; claimed: {part['expected']}", fontsize=8.5, color=SOFT)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c9cac3")
    axes.tick_params(axis="x", labelsize=8.5, colors=SOFT, length=3)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.locator_params(axis="x", nbins=5)
