"""Curves of pre-training: loss, sink rate and what the sink is worth over steps, and maps of where the sinks are."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sinklab.errors import InputError, ResultError
from sinklab.results.blocks import names
from sinklab.results.table import read_run, read_table

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

MOST_RUNS, MOST_MAPS = len(COLOURS) * len(STYLES), 8
"""Runs whose lines can be told apart, and runs whose maps are drawn below; of more, a page could not be read."""

MOST_LAYERS = 8
"""Layers that a legend names."""

SHARE_OF_QUERIES = 0.5
"""The mean weight on a key that few queries see is large by chance; positions that fewer than this share see are no sinks."""

MEASURED_BY = {"watch": ("threshold", "window", "seq_len", "samples"), "data": ("corpus", "tokenizer", "bos")}
"""Settings that decide how a rate is taken, and of which tokens a loss is."""

WIDTH = 46
"""Characters of a title over a third of the figure."""

Points: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.float64]]"
"""Steps, and a value at each."""


@dataclasses.dataclass(frozen=True, eq=False)
class RunCurves:
    """What is drawn of one run.

    Attributes:
        folder: where it was read, absolute.
        operation: attention operation.
        table: its long table.
        sink: position with the largest sink rate at the last measurement, 0-based, among those that at least
            :data:`SHARE_OF_QUERIES` of the queries see.
        config: the configuration that it was trained with.
    """

    folder: Path
    operation: str
    table: pd.DataFrame
    sink: int
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def series(self, probe: str, metric: str, key_position: int | None = None) -> Points:
        """Steps and values of one number of the whole model; empty when it was not measured."""
        table = self.table[self.table["layer"].isna()]
        rows = table[(table["probe"] == probe) & (table["metric"] == metric)]
        rows = rows[rows["key_position"].isna() if key_position is None else rows["key_position"] == key_position]
        rows = rows.sort_values("step")
        return rows["step"].to_numpy(np.int64), rows["value"].to_numpy(np.float64)

    def profile(self) -> pd.DataFrame:
        """Sink rate in percent by position (rows) and step (columns); late positions, which few queries see, are left out."""
        rows = self._rate.query("layer.isna() and key_position.notna()")
        rows = rows[_seen_by_enough(rows)]
        return rows.pivot(index="key_position", columns="step", values="value").sort_index()

    @functools.cached_property
    def heads(self) -> pd.DataFrame:
        """Sink rate in percent at :attr:`sink` by layer and head (rows) and step (columns)."""
        rows = self._rate
        rows = rows[rows["head"].notna() & (rows["key_position"] == self.sink)]
        return rows.pivot(index=["layer", "head"], columns="step", values="value").sort_index()

    def layers(self) -> pd.DataFrame:
        """Sink rate in percent at :attr:`sink` by layer (rows) and step (columns), the mean over its heads."""
        return self.heads.groupby(level="layer").mean()

    @functools.cached_property
    def _rate(self) -> pd.DataFrame:
        return self.table[(self.table["probe"] == "sink_rate") & (self.table["metric"] == "gu2024")]


def read_curves(folder: Path) -> RunCurves:
    """The curves of a run's output directory.

    Raises:
        InputError: no run there, or one that measured nothing yet.
    """
    run, table = read_run(folder), read_table(folder / "table.parquet")
    if not table["step"].notna().any():
        raise InputError(
            f"{folder}, a run of {run.get('kind', 'another command')}, has no numbers by step; give the output directory of "
            "'sinklab pretrain' or of a run in a sweep"
        )
    rates = table[(table["probe"] == "sink_rate") & (table["metric"] == "gu2024") & table["layer"].isna()]
    sink = 0
    if len(rates):
        rates = rates[_seen_by_enough(rates)]
        last = rates[rates["step"] == rates["step"].max()].sort_values("key_position")
        sink = int(last["key_position"].iloc[int(last["value"].to_numpy().argmax())])
    operations, config = table["operation"].dropna(), run.get("config") or {}
    operation = str(operations.iloc[-1]) if len(operations) else str(config.get("name", ""))
    return RunCurves(folder.resolve(), operation, table, sink, config)


def _seen_by_enough(rates: pd.DataFrame) -> pd.Series:
    return rates["key_position"] <= rates["key_position"].max() * (1.0 - SHARE_OF_QUERIES)


def read_runs(folders: Sequence[Path]) -> tuple[list[RunCurves], list[str]]:
    """The runs in some folders, each once, and the names of cells of sweeps that have no numbers yet."""
    runs: dict[Path, RunCurves] = {}
    missing: list[str] = []
    for folder in folders:
        if (folder / "run.json").is_file() or not (folder / "sweep.json").is_file():
            runs[folder.resolve()] = read_curves(folder)
            continue
        for cell in read_run(folder, "sweep.json").get("cells", []):
            try:
                runs[(folder / cell["name"]).resolve()] = read_curves(folder / cell["name"])
            except (InputError, ResultError):
                missing.append(str(cell["name"]))
    if not runs:
        raise InputError(f"no run of {names(list(map(str, folders)))} has numbers to draw yet")
    return list(runs.values()), missing


def labels_of(runs: Sequence[RunCurves]) -> list[str]:
    """The operations, where they tell the runs apart; or else the folders' names, a cell's without its digest."""
    operations = [run.operation for run in runs]
    if len(set(operations)) == len(runs) > 1:
        return operations
    short = [re.sub(r"(=.*)-[0-9a-f]+$", r"\1", run.folder.name) for run in runs]
    several = Counter(short)
    named = [
        f"{run.folder.parent.name}/{label}" if several[label] > 1 else label for run, label in zip(runs, short, strict=True)
    ]
    return [label if run.operation in label else f"{label} ({run.operation})" for run, label in zip(runs, named, strict=True)]


def measured_apart(runs: Sequence[RunCurves]) -> str:
    """In what the measurements of runs differ, whose lines stand in one picture; empty where in nothing."""
    differing = []
    for part, settings in MEASURED_BY.items():
        for name in settings:
            known = [run.config[part][name] for run in runs if name in run.config.get(part, {})]
            values = list(dict.fromkeys(value if isinstance(value, str) else json.dumps(value) for value in known))
            if len(values) > 1:
                differing.append(f"{part}.{name} ({', '.join(values)})")
    versions: dict[str, set[int]] = {}
    for run in runs:
        for metric, version in run.table[["metric", "version"]].drop_duplicates().dropna().itertuples(index=False):
            versions.setdefault(metric, set()).add(int(version))
    differing += [f"the definition of {metric}" for metric, several in versions.items() if len(several) > 1]
    return f"These runs differ in {names(differing)}: what depends on it is not comparable as it stands." if differing else ""


def notes_of(runs: Sequence[RunCurves], missing: Sequence[str] = ()) -> list[str]:
    """What to know of a figure: cells that are not drawn, in what measurements differ, and runs without maps."""
    beyond = sum(len(run.heads) > 0 for run in runs) - MOST_MAPS
    notes = [
        f"Not drawn, as they have no numbers: {names(missing)}." if missing else "",
        measured_apart(runs),
        f"Maps are those of the first {MOST_MAPS} runs, and not of {beyond} more." if beyond > 0 else "",
    ]
    return [note for note in notes if note]


def draw_runs(runs: Sequence[RunCurves], notes: Sequence[str] = ()) -> Figure:
    """One figure: loss, sink rate and loss gap of all runs together; below, for the first runs, layers, heads and positions.

    Args:
        notes: sentences for the foot of the figure.

    Raises:
        InputError: more runs than can be told apart.
    """
    from matplotlib.figure import Figure

    if len(runs) > MOST_RUNS:
        raise InputError(
            f"{len(runs)} lines would look alike: one picture has {MOST_RUNS} looks; give the folders of some runs"
        )
    labels = labels_of(runs)
    mapped = [(run, label) for run, label in zip(runs, labels, strict=True) if len(run.heads)][:MOST_MAPS]
    foot = [line for text in notes for line in textwrap.wrap(text, 200)]
    columns = max(1, min(3, 150 // (max(map(len, labels)) + 20)))
    # The legend takes room of its own; a null score has a line beside that of its position.
    lines = sum(1 + bool(len(run.series("sink_rate", "gu2024_null")[0])) for run in runs)
    height = 3.4 + 0.17 * (-(-lines // columns) + len(foot)) + 2.6 * len(mapped)
    figure = Figure(figsize=(13.0, height), layout="constrained", dpi=130)
    grid = figure.add_gridspec(1 + len(mapped), 3, height_ratios=[1.25] + [1.0] * len(mapped))
    top = [figure.add_subplot(grid[0, column]) for column in range(3)]
    drawn = [
        line for index, (run, label) in enumerate(zip(runs, labels, strict=True)) for line in _draw(top, run, label, index)
    ]
    _finish(top[0], "loss (strong: held-out; faint: training)", "nats per token")
    _finish(top[1], "sink rate (Gu et al. 2024)", "% of heads and samples", floor=0.0)
    _finish(top[2], "what the sink is worth to a windowed model", "nats per token")
    top[2].axhline(0.0, color="#8c959f", linewidth=0.8)
    if drawn:
        figure.legend(handles=drawn, loc="outside upper center", ncols=columns, fontsize=8, frameon=False, handlelength=4)
    for row, (run, label) in enumerate(mapped, start=1):
        layers, heads, profile = (figure.add_subplot(grid[row, column]) for column in range(3))
        _draw_layers(layers, run, label)
        _draw_map(heads, run.heads, _title(label, f"heads, sink rate at position {run.sink}"), "layer.head", heads=True)
        _draw_map(profile, run.profile(), _title(label, "positions, whole model"), "key position", heads=False)
    if foot:
        figure.supxlabel("\n".join(foot), fontsize=8)
    return figure


def _draw(top: Sequence[Axes], run: RunCurves, label: str, index: int) -> list[Line2D]:
    """Draw a run on the three axes; the lines that stand for it in the legend."""
    colour, turn = COLOURS[index % len(COLOURS)], index // len(COLOURS)
    style = {"linestyle": STYLES[turn]}
    _line(top[0], run.series("training", "train_loss"), colour, None, linewidth=0.8, alpha=0.4, **style)
    loss = _line(top[0], run.series("training", "held_out_loss"), colour, label, marker="o", markersize=3, **style)
    rate = _line(top[1], run.series("sink_rate", "gu2024", run.sink), colour, f"{label}, position {run.sink}", **style)
    # The mass on a sink logit or key bias is the same kind of sink at no position of the text.
    dashed = {"linestyle": "--", "marker": NULL_MARKERS[turn], "markersize": 4}
    null = _line(top[1], run.series("sink_rate", "gu2024_null"), colour, f"{label}, null score", **dashed)
    gap = _line(top[2], run.series("sink_readout", "sink_loss_gap"), colour, label, **style)
    # One legend for the three axes: lines of the sink rate, and of runs that have none, another one.
    return [line for line in (rate or loss or gap, null) if line is not None]


def _title(label: str, what: str) -> str:
    """In lines that the title of one third of the figure has room for."""
    together = f"{label}: {what}"
    return together if len(together) <= WIDTH else "\n".join([*textwrap.wrap(label, WIDTH), what])


def _line(axes: Axes, points: Points, colour: Any, label: str | None, **style: Any) -> Line2D | None:
    if not len(points[0]):
        return None
    if len(points[0]) == 1:  # a line of one point is not to be seen
        style |= {"marker": "o", "markersize": 4}
    (line,) = axes.plot(*points, color=colour, label=label, linewidth=style.pop("linewidth", 1.8), **style)
    return line


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
    _ticks(axes.set_yticks, [f"{row[0]}.{row[1]}" if heads else f"{int(row)}" for row in values.index], 12)
    _ticks(axes.set_xticks, [str(step) for step in steps], 6)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=7)
    bar = axes.get_figure().colorbar(image, ax=axes, fraction=0.04, pad=0.02)  # type: ignore[union-attr]
    bar.ax.tick_params(labelsize=7)
    bar.set_label("% of samples" if heads else "% of heads and samples", fontsize=7)


def _ticks(set_ticks: Callable[[Sequence[float], Sequence[str]], object], texts: list[str], most: int) -> None:
    every = max(1, -(-len(texts) // most))
    set_ticks(list(range(0, len(texts), every)), texts[::every])


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
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}".replace("-", "\u2212")))
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
