"""The heat map of a grid: tasks by conditions, coloured by how much of each score is lost against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.results.file import write_image
from sinklab.studies.depend.words import column_name, index_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

__all__ = ["write_heatmap"]

AT_CHANCE = "0.93"
"""Grey of cells that say nothing."""
SIGHTS = ("visible", "hidden")
LEGEND = (
    "share of the score above chance (of nats: above one token of context) that is lost against the first column; "
    "bold: its interval excludes 0; grey: at chance"
)
DARK = 0.6
"""Share of the scale of colours from which on a cell has white text."""
LEAST_REACH = 0.1
"""The scale of colours reaches as far as any cell does, and so far at least: noise is to look like noise."""


def write_heatmap(tasks: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the grid.

    Each cell has the score, coloured by :data:`~sinklab.studies.depend.dependence.SCORE_LOST` and bold where the interval of
    that excludes 0; the last column has the index of dependence of the task at the reference.

    Args:
        tasks: of the summary of :func:`~sinklab.studies.depend.depend.depend`; all have one grid.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    pairs = tasks[0]["grid"]
    columns = [(number, sight) for number, pair in enumerate(pairs) for sight in SIGHTS if pair[sight] is not None]
    width = max(len(task["task"]) for task in tasks)
    figure = Figure(figsize=(0.11 * width + 0.82 * len(columns) + 3.0, 0.62 * len(tasks) + 1.9), layout="constrained")
    axes = figure.subplots()
    sides = [task["grid"][number][sight] for task in tasks for number, sight in columns]
    reach = max([LEAST_REACH, *(abs(side["lost"]["mean"]) for side in sides if "mean" in side.get("lost", {}))])
    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(-reach, reach), mpl.colormaps["RdBu_r"])
    for row, task in enumerate(tasks):
        for column, (number, sight) in enumerate(columns):
            _draw_cell(axes, column, row, task["grid"][number][sight], scale)
        axes.text(len(columns) + 0.15, row + 0.5, index_text(task["dependence"]), ha="left", va="center", fontsize=9)
    _draw_column_names(axes, pairs, columns)
    axes.text(len(columns) + 0.15, -0.12, "index of dependence", ha="left", va="bottom", fontsize=8, color="0.3")
    axes.set_xlim(0, len(columns) + 3.0)
    axes.set_ylim(len(tasks), -1.5)
    axes.set_yticks(
        [row + 0.5 for row in range(len(tasks))], [f"{task['task']}\n{task['metric'].replace('_', ' ')}" for task in tasks]
    )
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(scale, ax=axes, location="bottom", fraction=0.05, aspect=50, shrink=0.6)
    bar.set_label(LEGEND, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    write_image(figure, path, dpi=150)


def _draw_cell(axes: Axes, column: int, row: int, side: Mapping[str, Any], scale: ScalarMappable) -> None:
    """The score of a cell, coloured by what is lost, and bold where the interval of that excludes 0."""
    from matplotlib.patches import Rectangle

    interval = side.get("lost", {})
    lost = interval.get("mean")
    colour: Any = AT_CHANCE
    ink, weight = "0.45", None
    if lost is not None:
        colour = scale.to_rgba(lost)
        ink = "white" if abs(lost) > DARK * scale.get_clim()[1] else "0.1"
        weight = "bold" if interval["low"] > 0.0 or interval["high"] < 0.0 else None
    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
    text = "–" if "refused" in side else f"{side['score']['mean']:.2f}"
    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9, color=ink, weight=weight)


def _draw_column_names(axes: Axes, pairs: Sequence[Mapping[str, Any]], columns: Sequence[tuple[int, str]]) -> None:
    """Above each pair of columns what it differs in from the first one, and above each column whether the sink is visible."""
    for number, start, stop in _groups(columns):
        if start:
            axes.axvline(start, color="0.35", linewidth=0.8)
        name = column_name(pairs[number], pairs[0])
        axes.text((start + stop) / 2, -0.55, name, ha="center", va="bottom", fontsize=9, weight="bold" if not number else None)
    for column, (_, sight) in enumerate(columns):
        text = "sink" if sight == "visible" else "no sink"
        axes.text(column + 0.5, -0.12, text, ha="center", va="bottom", fontsize=8, color="0.3")


def _groups(columns: Sequence[tuple[int, str]]) -> Iterator[tuple[int, int, int]]:
    """Pair, and its first and last column."""
    for number in dict.fromkeys(number for number, _ in columns):
        own = [column for column, (pair, _) in enumerate(columns) if pair == number]
        yield number, own[0], own[-1] + 1
