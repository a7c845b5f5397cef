"""Curves of pre-training: loss, sink rate and what the sink is worth over steps, and maps of where the sinks are."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinklab.errors import InputError
from sinklab.report.training_runs import WIDTH, Points, RunCurves, labels_of, listed, read_runs
from sinklab.results.file import check_file, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which people with any kind of colour vision tell apart; black comes last."""

STYLES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", "-.", ":", (0, (7, 1, 1, 1, 1, 1)))
"""Of the lines of runs: where there are more runs than colours, the colours come again in the next style."""

NULL_MARKERS = ("", "x", "^", "s")
"""On the dashed lines of null scores, which have no style of their own left: one for each of :data:`STYLES`."""

MOST_LOOKS = len(COLOURS) * len(STYLES)
"""Lines that can be told apart; more would look alike."""

MOST_MAPS = 8
"""Runs whose maps are drawn; of more, a page could not be read."""

MOST_LAYERS = 8
"""Layers that a legend names."""


def draw_runs(runs: Sequence[RunCurves], *, missing: str = "") -> Figure:
    """One figure: loss, sink rate and loss gap of all runs together; below, for every run, its layers, heads and positions.

    Runs whose layers, heads and positions are not drawn are named below (:func:`without_maps`). Of more than
    :data:`MOST_LOOKS` runs, those of a sweep that differ in nothing but their seed have one look and one name.

    Args:
        missing: a sentence on what is not there, for the foot of the figure.

    Raises:
        InputError: no runs, or more than can be told apart.
    """
    from matplotlib.figure import Figure

    if not runs:
        raise InputError("there is nothing to draw: no run was given")
    labels, looks = labels_of(runs), _looks(runs)
    mapped = _mapped(runs)
    shared = "Runs that differ in nothing but their seed have one look." if len(looks) < len(runs) else ""
    sentences = (missing, measured_apart(runs), without_maps(runs), shared)
    notes = [line for text in sentences for line in textwrap.wrap(text, 200)]
    columns = max(1, min(3, 150 // (max(len(label) for _, label in looks) + 20)))
    # The legend takes room of its own; a null score has a line beside that of its position.
    lines = sum(1 + any(len(run.series("sink_rate", "gu2024_null")[0]) for run in members) for members, _ in looks)
    height = 3.4 + 0.17 * (-(-lines // columns) + len(notes)) + 2.6 * len(mapped)
    figure = Figure(figsize=(13.0, height), layout="constrained", dpi=130)
    grid = figure.add_gridspec(1 + len(mapped), 3, height_ratios=[1.25] + [1.0] * len(mapped))
    top = [figure.add_subplot(grid[0, column]) for column in range(3)]
    named: dict[str, Line2D] = {}
    for index, (members, label) in enumerate(looks):
        named |= {str(line.get_label()): line for line in _draw_look(top, members, label, index)}
    _finish(top[0], "loss (strong: held-out; faint: training)", "nats per token")
    _finish(top[1], "sink rate (Gu et al. 2024)", "% of heads and samples", floor=0.0)
    _finish(top[2], "what the sink is worth to a windowed model", "nats per token")
    top[2].axhline(0.0, color="#8c959f", linewidth=0.8)
    if named:
        figure.legend(
            list(named.values()), list(named), loc="outside upper center", ncols=columns, fontsize=8, frameon=False,
            handlelength=4,
        )  # fmt: skip
    for row, index in enumerate(mapped, start=1):
        run, label = runs[index], labels[index]
        layers, heads, profile = (figure.add_subplot(grid[row, column]) for column in range(3))
        _draw_layers(layers, run, label)
        _draw_map(heads, run.heads(), _title(label, f"heads, sink rate at position {run.sink}"), "layer.head", heads=True)
        _draw_map(profile, run.profile(), _title(label, "positions, whole model"), "key position", heads=False)
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=8)
    return figure


def _draw_look(top: Sequence[Axes], members: Sequence[RunCurves], label: str, index: int) -> list[Line2D]:
    """Draw the runs of one look on the three axes; the lines that stand for them in the legend."""
    colour, turn = COLOURS[index % len(COLOURS)], index // len(COLOURS)
    width = 1.8 if len(members) == 1 else 1.0
    losses = [_draw_losses(top[0], run, label, colour, turn, width) for run in members]
    rates = [_draw_rates(top[1], run, _with_place(label, members), colour, turn, width) for run in members]
    nulls = [_draw_nulls(top[1], run, f"{label}, null score", colour, turn, width) for run in members]
    gaps = [
        _line(top[2], run.series("sink_readout", "sink_loss_gap"), colour, label, linestyle=STYLES[turn], linewidth=width)
        for run in members
    ]
    # One legend for the axes of all runs: lines of the sink rate, and of runs that have none, others.
    first = next(filter(None, [*rates, *nulls, *losses, *gaps]), None)
    return [line for line in (first, next(filter(None, nulls), None)) if line is not None]


def measured_apart(runs: Sequence[RunCurves]) -> str:
    """In what the measurements of runs differ, whose lines stand in one picture; empty where in nothing."""
    parts = []
    for name in dict.fromkeys(name for run in runs for name in run.measured):
        measured = [run.measured[name] for run in runs if name in run.measured]
        values = list(dict.fromkeys(value if isinstance(value, str) else json.dumps(value) for value in measured))
        if len(values) > 1:
            parts.append(f"{name} ({', '.join(values)})")
    differ = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
    return f"These runs differ in {differ}: what depends on it is not comparable as it stands." if parts else ""


def without_maps(runs: Sequence[RunCurves]) -> str:
    """Which runs have curves only, and why; empty where every run has its maps."""
    labels, mapped = labels_of(runs), _mapped(runs)
    known = [index for index, run in enumerate(runs) if len(run.heads())]
    missing = [labels[index] for index in range(len(runs)) if index not in known]
    beyond = [labels[index] for index in known if index not in mapped]
    parts = [f"{listed(beyond)} (only the first {MOST_MAPS} are drawn)"] if beyond else []
    parts += [f"{listed(missing)} (no sink rate of single heads was measured)"] if missing else []
    return f"Without maps of layers, heads and positions: {', and '.join(parts)}." if parts else ""


def write_plot(
    folders: Sequence[Path], out: Path, *, overwrite: bool = False, note: Callable[[str], object] | None = None
) -> Path:
    """Draw the runs in ``folders`` to ``out``; the suffix decides the format (png, svg, pdf).

    A folder of a sweep stands for its cells; those that have no numbers yet are left out, and named. A run that is given twice
    is drawn once.

    Args:
        overwrite: replace a file that is there.
        note: told which cells of a sweep are not drawn, in what the measurements of the runs differ (:func:`measured_apart`),
            and which runs have no maps (:func:`without_maps`), if there are such.

    Raises:
        InputError: no folder, a folder without a run, a sweep without any numbers, more runs than can be told apart,
            a suffix that matplotlib cannot write, or something at ``out`` that is not replaced
            (:func:`~sinklab.results.file.check_file`).
    """
    check_file(out, overwrite)
    runs, missing = read_runs(folders)
    figure = draw_runs(runs, missing=missing)
    formats = figure.canvas.get_supported_filetypes()
    if out.suffix.lstrip(".") not in formats:
        raise InputError(f"cannot write {out.name!r}: give a name that ends in .png, .svg or .pdf")
    write_file(out, lambda temporary: figure.savefig(temporary, format=out.suffix.lstrip(".")), overwrite=overwrite)
    for said in filter(None, (missing, measured_apart(runs), without_maps(runs))):
        if note is not None:
            note(said)
    return out


def _mapped(runs: Sequence[RunCurves]) -> list[int]:
    """Numbers of the runs whose maps are drawn."""
    return [index for index, run in enumerate(runs) if len(run.heads())][:MOST_MAPS]


def _looks(runs: Sequence[RunCurves]) -> list[tuple[list[RunCurves], str]]:
    """Runs that are drawn in one look, with their name: each by itself, or all seeds of a setting where there are too many."""
    if len(runs) <= MOST_LOOKS:
        return [([run], label) for run, label in zip(runs, labels_of(runs), strict=True)]
    groups: dict[object, list[RunCurves]] = {}
    for run in runs:
        settings = {path: value for path, value in run.settings.items() if path != "seed"}
        groups.setdefault((run.folder.parent, str(settings)) if run.settings else run.folder, []).append(run)
    if len(groups) > MOST_LOOKS:
        several = ", each with the seeds of one setting," if len(groups) < len(runs) else ""
        raise InputError(
            f"{len(groups)} lines{several} would look alike: one picture has {MOST_LOOKS} looks; give the folders of the runs "
            f"to compare, such as {runs[0].folder} {runs[1].folder}"
        )
    standing = []
    for members in groups.values():
        settings = {path: value for path, value in members[0].settings.items() if path != "seed"}
        # Of a sweep over seeds alone, its folder is what has a name.
        place = members[0].folder.parent if members[0].settings and not settings else members[0].folder
        standing.append(dataclasses.replace(members[0], settings=settings, folder=place, name=place.name))
    named = zip(groups.values(), labels_of(standing), strict=True)
    return [(members, f"{label}, {len(members)} seeds" if len(members) > 1 else label) for members, label in named]


def _with_place(label: str, runs: Sequence[RunCurves]) -> str:
    places = sorted({run.sink for run in runs})
    if len(places) > 3:
        return f"{label}, strongest position of each"
    return f"{label}, position{'s' if len(places) > 1 else ''} {' or '.join(map(str, places))}"


def _title(label: str, what: str) -> str:
    """In lines that the title of one third of the figure has room for."""
    together = f"{label}: {what}"
    return together if len(together) <= WIDTH else "\n".join([*textwrap.wrap(label, WIDTH), what])


def _line(axes: Axes, points: Points, colour: Any, label: str | None, **style: Any) -> Line2D | None:
    if not len(points[0]):
        return None
    if len(points[0]) == 1:  # a line of one point is not to be seen
        style = {"marker": "o", "markersize": 4} | style
    (line,) = axes.plot(*points, color=colour, label=label, linewidth=style.pop("linewidth", 1.8), **style)
    return line


def _draw_losses(axes: Axes, run: RunCurves, label: str, colour: str, turn: int, width: float) -> Line2D | None:
    faint = {"linewidth": 0.8, "alpha": 0.4, "linestyle": STYLES[turn]}
    _line(axes, run.series("training", "train_loss"), colour, None, **faint)
    strong = {"linewidth": width, "marker": "o", "markersize": 3, "linestyle": STYLES[turn]}
    return _line(axes, run.series("training", "held_out_loss"), colour, label, **strong)


def _draw_rates(axes: Axes, run: RunCurves, label: str, colour: str, turn: int, width: float) -> Line2D | None:
    points = run.series("sink_rate", "gu2024", run.sink)
    return _line(axes, points, colour, label, linestyle=STYLES[turn], linewidth=width)


def _draw_nulls(axes: Axes, run: RunCurves, label: str, colour: str, turn: int, width: float) -> Line2D | None:
    # The mass on a sink logit or key bias is the same kind of sink at no position of the text.
    marked = {"marker": NULL_MARKERS[turn], "markersize": 4} if NULL_MARKERS[turn] else {}
    points = run.series("sink_rate", "gu2024_null")
    return _line(axes, points, colour, label, linestyle="--", linewidth=width, **marked)


def _draw_layers(axes: Axes, run: RunCurves, label: str) -> None:
    from matplotlib import colormaps

    layers = run.layers()
    # The shades go with depth: of a deep model, the names of some layers say it without covering the lines.
    named = {round(place) for place in np.linspace(0, len(layers) - 1, min(len(layers), MOST_LAYERS))}
    for index, (layer, values) in enumerate(layers.iterrows()):
        shade = colormaps["viridis"](index / max(1, len(layers) - 1) * 0.92)
        points = values.index.to_numpy(np.int64), values.to_numpy(np.float64)
        _line(axes, points, shade, f"{layer}" if index in named else None, linewidth=1.4)
    _finish(axes, _title(label, f"layers, sink rate at position {run.sink}"), "% of heads and samples", floor=0.0)
    axes.legend(title="layer", fontsize=7, title_fontsize=7, frameon=False, ncols=2)


def _draw_map(axes: Axes, values: pd.DataFrame, title: str, label: str, *, heads: bool) -> None:
    """A heat map over steps in percent; one cell a row and a measurement."""
    steps, cells = values.columns.to_numpy(np.int64), values.to_numpy(np.float64)
    brightest = max(10.0, float(np.nanmax(cells)))
    image = axes.imshow(cells, aspect="auto", origin="lower", cmap="cividis", vmin=0.0, vmax=brightest, interpolation="nearest")
    names = [f"{row[0]}.{row[1]}" if heads else f"{int(row)}" for row in values.index]
    _ticks(axes.set_yticks, names, 12)
    _ticks(axes.set_xticks, [str(step) for step in steps], 6)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=7)
    bar = axes.get_figure().colorbar(image, ax=axes, fraction=0.04, pad=0.02)  # type: ignore[union-attr]
    bar.ax.tick_params(labelsize=7)
    bar.set_label("% of samples" if heads else "% of heads and samples", fontsize=7)


def _ticks(set_ticks: Callable[[Sequence[float], Sequence[str]], object], names: list[str], most: int) -> None:
    every = max(1, -(-len(names) // most))
    shown = list(range(0, len(names), every))
    set_ticks(shown, [names[index] for index in shown])


def _finish(axes: Axes, title: str, label: str, *, floor: float | None = None) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps = {int(step) for line in axes.lines for step in np.asarray(line.get_xdata(), dtype=np.int64)}
    if len(steps) == 1:  # one measurement has no extent; without limits of its own the axis would count fractions of a step
        (step,) = steps
        axes.set_xlim(step - 1, step + 1)
        axes.set_xticks([step])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    # Every tick says all of its value: a common factor would stand on the title.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    if floor is not None:
        # A rate that never leaves zero should look like zero, not like noise blown up to fill the axes.
        axes.set_ylim(floor, max(5.0, axes.get_ylim()[1]))
        for line in axes.lines:  # one that lies on the axis is seen on it
            line.set(clip_on=False, zorder=3)


def _tick(value: float) -> str:
    """``0.25``, ``−2e−5``; nothing of what adding up ticks leaves in the last digits."""
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.6g}").replace("e+", "e").replace("-", "\u2212")
