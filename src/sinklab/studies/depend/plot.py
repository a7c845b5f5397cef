"""The plot of a task: score against distance, context or position, one line a policy with its interval."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sinklab.results.file import write_image

__all__ = ["write_plots"]

AXES = {
    "distance": "tokens from the fact to the end of the answer",
    "context": "tokens of text before the scored ones",
    "position": "position in the stream",
}
COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#efb118", "#a463f2", "#6cc5b0", "#9c6b4e", "#9498a0")


NAME_LENGTH = 120
"""Bytes of a picture's name before its hash; file systems take 255, and a task may have a path in its settings."""


def write_plots(tasks: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Draw every task that has curves, ``TASK.png`` in a folder; what no file is named is a hyphen there.

    A long name is cut, and has a hash of the task at its end; so has one that two tasks would have.

    Args:
        tasks: of the summary of :func:`~sinklab.studies.depend.depend.depend`.
    """
    drawn = [task for task in tasks if task["curves"]]
    names = [re.sub(r"[^\w.,=-]+", "-", task["task"]) for task in drawn]
    for task, name in zip(drawn, names, strict=True):
        shared = [one.casefold() for one in names].count(name.casefold()) > 1  # some file systems take both for one
        if shared or len(name.encode()) > NAME_LENGTH:
            cut = name.encode()[:NAME_LENGTH].decode(errors="ignore")
            name = f"{cut}-{hashlib.sha256(task['task'].encode()).hexdigest()[:8]}"
        _write_plot(task, folder / f"{name}.png")


def _write_plot(summary: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    places: list[int] = []
    for number, (name, curve) in enumerate(summary["curves"].items()):
        places = [point["at"] for point in curve]
        colour = COLOURS[number % len(COLOURS)]
        # Policies that agree lie on top of each other; dashes of different lengths let all of them be seen.
        dashes = (0, (1 + number, number % 3))
        means = [point["mean"] for point in curve]
        axes.plot(places, means, marker="o", markersize=3, linestyle=dashes, color=colour, label=name)
        axes.fill_between(
            places, [point["low"] for point in curve], [point["high"] for point in curve], color=colour, alpha=0.15, linewidth=0
        )
    if summary["chance"] is not None:
        axes.axhline(summary["chance"], color="0.6", linewidth=0.8, linestyle=":", label="chance")
    axes.axvline(summary["window"], color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    if len(places) <= 10:
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
    axes.set_xlabel(AXES[summary["axis"]])
    axes.set_ylabel(f"{summary['metric'].replace('_', ' ')} ({summary['unit']})")
    axes.set_title(f"{summary['task']}: depends on the sink tokens: {summary['verdict']}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    write_image(figure, path, dpi=150)
