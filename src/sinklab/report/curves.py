"""Curves of pre-training: loss, sink rate and what the sink is worth over steps, and maps of where the sinks are."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sinklab.errors import InputError
from sinklab.results.file import check_file, write_file
from sinklab.results.table import read_run, read_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RunCurves", "draw_runs", "read_curves", "without_maps", "write_plot"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which people with any kind of colour vision tell apart; black comes last."""

STYLES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", "-.", ":", (0, (7, 1, 1, 1, 1, 1)))
"""Of the lines of runs: where there are more runs than colours, the colours come again in the next style."""

NULL_MARKERS = ("", "x", "^", "s")
"""On the dashed lines of null scores, which have no style of their own left: one for each of :data:`STYLES`."""

WIDTH = 46
"""Characters of a title over a third of the figure."""

SHARE_OF_QUERIES = 0.5
"""The mean weight on a key that few queries see is large by chance; positions that fewer than this share see are no sinks."""

MOST_MAPS = 8
"""Runs whose maps are drawn; of more, a page could not be read."""


Points: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.float64]]"
"""Steps, and a value at each."""


@dataclasses.dataclass(frozen=True, eq=False)
class RunCurves:
    """What is drawn of one run.

    Attributes:
        name: name of its folder.
        operation: attention operation.
        table: its long table.
        sink: position with the largest sink rate at the last measurement, 0-based, among those that at least
            :data:`SHARE_OF_QUERIES` of the queries see.
        settings: of a run of a sweep, what the sweep varies, the seed last; empty for others.
    """

    name: str
    operation: str
    table: pd.DataFrame
    sink: int
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def series(self, probe: str, metric: str, key_position: int | None = None) -> Points:
        """Steps and values of one number of the whole model; empty when it was not measured."""
        rows = self.table[(self.table["probe"] == probe) & (self.table["metric"] == metric) & self.table["layer"].isna()]
        rows = rows[rows["key_position"].isna() if key_position is None else rows["key_position"] == key_position]
        rows = rows.sort_values("step")
        return rows["step"].to_numpy(np.int64), rows["value"].to_numpy(np.float64)

    def profile(self) -> pd.DataFrame:
        """Sink rate in percent by position (rows) and step (columns); late positions, which few queries see, are left out."""
        rows = self._rate().query("layer.isna() and key_position.notna()")
        rows = rows[_seen_by_enough(rows)]
        return rows.pivot(index="key_position", columns="step", values="value").sort_index()

    def heads(self) -> pd.DataFrame:
        """Sink rate in percent at :attr:`sink` by layer and head (rows) and step (columns)."""
        rows = self._rate()
        rows = rows[rows["head"].notna() & (rows["key_position"] == self.sink)]
        return rows.pivot(index=["layer", "head"], columns="step", values="value").sort_index()

    def layers(self) -> pd.DataFrame:
        """Sink rate in percent at :attr:`sink` by layer (rows) and step (columns), the mean over its heads."""
        return self.heads().groupby(level="layer").mean()

    def _rate(self) -> pd.DataFrame:
        return self.table[(self.table["probe"] == "sink_rate") & (self.table["metric"] == "gu2024")]


def read_curves(folder: Path) -> RunCurves:
    """The curves of a run's output directory.

    Raises:
        InputError: no run there, or one that measured nothing yet.
    """
    run, table = read_run(folder), read_table(folder / "table.parquet")
    if not table["step"].notna().any():
        page = folder / "report.html"
        raise InputError(
            f"{folder}, a run of {run.get('kind', 'another command')}, has no numbers by step; give the output directory of "
            f"'sinklab pretrain' or of a run in a sweep{f', or open {page}' if page.is_file() else ''}"
        )
    rates = table[(table["probe"] == "sink_rate") & (table["metric"] == "gu2024") & table["layer"].isna()]
    sink = 0
    if len(rates):
        rates = rates[_seen_by_enough(rates)]
        last = rates[rates["step"] == rates["step"].max()].sort_values("key_position")
        sink = int(last["key_position"].iloc[int(last["value"].to_numpy().argmax())])
    operations = table["operation"].dropna()
    operation = str(operations.iloc[-1]) if len(operations) else str(run.get("config", {}).get("name", ""))
    return RunCurves(name=folder.resolve().name, operation=operation, table=table, sink=sink, settings=_settings(folder))


def _seen_by_enough(rates: pd.DataFrame) -> pd.Series:
    return rates["key_position"] <= rates["key_position"].max() * (1.0 - SHARE_OF_QUERIES)


def draw_runs(runs: Sequence[RunCurves]) -> Figure:
    """One figure: loss, sink rate and loss gap of all runs together; below, for every run, its layers, heads and positions.

    Runs whose layers, heads and positions are not drawn are named below (:func:`without_maps`).

    Raises:
        InputError: no runs.
    """
    from matplotlib.figure import Figure

    if not runs:
        raise InputError("there is nothing to draw: no run was given")
    labels = _labels(runs)
    mapped, note = _mapped(runs), without_maps(runs)
    columns = max(1, min(3, 150 // (max(map(len, labels)) + 20)))
    # The legend takes room of its own; a null score has a line beside that of its position.
    lines = sum(1 + bool(len(run.series("sink_rate", "gu2024_null")[0])) for run in runs)
    height = 3.4 + 0.17 * -(-lines // columns) + 2.6 * len(mapped)
    figure = Figure(figsize=(13.0, height), layout="constrained", dpi=130)
    grid = figure.add_gridspec(1 + len(mapped), 3, height_ratios=[1.25] + [1.0] * len(mapped))
    top = [figure.add_subplot(grid[0, column]) for column in range(3)]
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        colour, turn = COLOURS[index % len(COLOURS)], index // len(COLOURS) % len(STYLES)
        _draw_losses(top[0], run, label, colour, turn)
        _draw_rates(top[1], run, label, colour, turn)
        _line(top[2], run.series("sink_readout", "sink_loss_gap"), colour, label, linestyle=STYLES[turn])
    _finish(top[0], "loss (strong: held-out; faint: training)", "nats per token")
    _finish(top[1], "sink rate (Gu et al. 2024)", "% of heads and samples", floor=0.0)
    _finish(top[2], "what the sink is worth to a windowed model", "nats per token")
    top[2].axhline(0.0, color="#8c959f", linewidth=0.8)
    handles, names = _legend(top, labels)
    if handles:
        figure.legend(handles, names, loc="outside upper center", ncols=columns, fontsize=8, frameon=False, handlelength=4)
    for row, index in enumerate(mapped, start=1):
        run, label = runs[index], labels[index]
        layers, heads, profile = (figure.add_subplot(grid[row, column]) for column in range(3))
        _draw_layers(layers, run, label)
        _draw_map(heads, run.heads(), _title(label, f"heads, sink rate at position {run.sink}"), "layer.head", heads=True)
        _draw_map(profile, run.profile(), _title(label, "positions, whole model"), "key position", heads=False)
    if note:
        figure.supxlabel(textwrap.fill(note, 200), fontsize=8)
    return figure


def without_maps(runs: Sequence[RunCurves]) -> str:
    """Which runs have curves only, and why; empty where every run has its maps."""
    labels, mapped = _labels(runs), _mapped(runs)
    known = [index for index, run in enumerate(runs) if len(run.heads())]
    missing = [labels[index] for index in range(len(runs)) if index not in known]
    beyond = [labels[index] for index in known if index not in mapped]
    parts = [f"{'; '.join(beyond)} (only the first {MOST_MAPS} are drawn)"] if beyond else []
    parts += [f"{'; '.join(missing)} (no sink rate of single heads was measured)"] if missing else []
    return f"Without maps of layers, heads and positions: {', and '.join(parts)}." if parts else ""


def write_plot(
    folders: Sequence[Path], out: Path, *, overwrite: bool = False, note: Callable[[str], object] | None = None
) -> Path:
    """Draw the runs in ``folders`` to ``out``; the suffix decides the format (png, svg, pdf).

    A folder of a sweep stands for its cells.

    Args:
        overwrite: replace a file that is there.
        note: told which runs have no maps, if there are such (:func:`without_maps`).

    Raises:
        InputError: no folder, a folder without a run, a suffix that matplotlib cannot write, or something at ``out`` that is
            not replaced (:func:`~sinklab.results.file.check_file`).
    """
    check_file(out, overwrite)
    runs = [read_curves(cell) for folder in folders for cell in _cells(folder)]
    figure = draw_runs(runs)
    formats = figure.canvas.get_supported_filetypes()
    if out.suffix.lstrip(".") not in formats:
        raise InputError(f"cannot write {out.name!r}: give a name that ends in .png, .svg or .pdf")
    write_file(out, lambda temporary: figure.savefig(temporary, format=out.suffix.lstrip(".")), overwrite=overwrite)
    said = without_maps(runs)
    if said and note is not None:
        note(said)
    return out


def _cells(folder: Path) -> list[Path]:
    if (folder / "run.json").is_file() or not (folder / "sweep.json").is_file():
        return [folder]
    cells = sorted(path.parent for path in folder.glob("*/run.json"))
    if not cells:
        raise InputError(f"the sweep in {folder} has no run yet: none of its cells has written a run.json")
    return cells


def _settings(folder: Path) -> dict[str, object]:
    """What a sweep varies in the cell of this folder, from the plan next to it."""
    plan = folder.resolve().parent / "sweep.json"
    cells = read_run(plan.parent, plan.name).get("cells") if plan.is_file() else None
    for cell in cells if isinstance(cells, list) else []:
        if isinstance(cell, dict) and cell.get("name") == folder.resolve().name and isinstance(cell.get("settings"), dict):
            return {**cell["settings"], "seed": cell.get("seed")}
    return {}


def _mapped(runs: Sequence[RunCurves]) -> list[int]:
    """Numbers of the runs whose maps are drawn."""
    return [index for index, run in enumerate(runs) if len(run.heads())][:MOST_MAPS]


def _labels(runs: Sequence[RunCurves]) -> list[str]:
    """The operations, where they tell the runs apart; or the settings of a sweep that differ; or else the folders' names,
    with the operation.
    """
    operations = [run.operation for run in runs]
    if len(set(operations)) == len(runs) > 1:
        return operations
    every = list(dict.fromkeys(path for run in runs for path in run.settings))
    differing = [path for path in every if len({_value(run.settings.get(path)) for run in runs if run.settings}) > 1]
    labels = []
    for run in runs:
        shown = {path: run.settings[path] for path in differing or every if path in run.settings}
        labels.append(", ".join(f"{_word(path, every)}={_value(value)}" for path, value in shown.items()))
    several = Counter(labels)
    for index, run in enumerate(runs):
        if not labels[index] or several[labels[index]] > 1:
            labels[index] = run.name if run.operation in run.name else f"{run.name} ({run.operation})"
    # Labels differ at their ends as often as at their beginnings.
    return [label if len(label) <= 2 * WIDTH else f"{label[: WIDTH - 1]}…{label[-WIDTH:]}" for label in labels]


def _word(path: str, every: Sequence[str]) -> str:
    """A setting by the last part of its path, or by as many as tell it from the others."""
    parts = path.removesuffix(".name").split(".")
    for start in range(len(parts) - 1, 0, -1):
        short = ".".join(parts[start:])
        if not any(other != path and f".{other.removesuffix('.name')}".endswith(f".{short}") for other in every):
            return short
    return path


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(one)}" for name, one in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _title(label: str, what: str) -> str:
    """In lines that the title of one third of the figure has room for."""
    together = f"{label}: {what}"
    return together if len(together) <= WIDTH else "\n".join([*textwrap.wrap(label, WIDTH), what])


def _legend(top: Sequence[Axes], labels: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Lines and names of one legend for the axes of all runs: those of the sink rate, and of runs that have none, others."""
    handles, names = top[1].get_legend_handles_labels()
    seen = {label for label in labels if any(name.startswith(f"{label}, ") for name in names)}
    for axes in (top[0], top[2]):
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            if name not in seen:
                seen.add(name)
                handles, names = [*handles, handle], [*names, name]
    return handles, names


def _line(axes: Axes, points: Points, colour: Any, label: str | None, **style: Any) -> None:
    if len(points[0]):
        if len(points[0]) == 1:  # a line of one point is not to be seen
            style = {"marker": "o", "markersize": 4} | style
        axes.plot(*points, color=colour, label=label, linewidth=style.pop("linewidth", 1.8), **style)


def _draw_losses(axes: Axes, run: RunCurves, label: str, colour: str, turn: int) -> None:
    _line(axes, run.series("training", "train_loss"), colour, None, linewidth=0.8, alpha=0.4, linestyle=STYLES[turn])
    _line(axes, run.series("training", "held_out_loss"), colour, label, marker="o", markersize=3, linestyle=STYLES[turn])


def _draw_rates(axes: Axes, run: RunCurves, label: str, colour: str, turn: int) -> None:
    _line(axes, run.series("sink_rate", "gu2024", run.sink), colour, f"{label}, position {run.sink}", linestyle=STYLES[turn])
    # The mass on a sink logit or key bias is the same kind of sink at no position of the text.
    marked = {"marker": NULL_MARKERS[turn], "markersize": 4} if NULL_MARKERS[turn] else {}
    _line(axes, run.series("sink_rate", "gu2024_null"), colour, f"{label}, null score", linestyle="--", **marked)


def _draw_layers(axes: Axes, run: RunCurves, label: str) -> None:
    from matplotlib import colormaps

    layers = run.layers()
    for index, (layer, values) in enumerate(layers.iterrows()):
        shade = colormaps["viridis"](index / max(1, len(layers) - 1) * 0.92)
        points = values.index.to_numpy(np.int64), values.to_numpy(np.float64)
        _line(axes, points, shade, f"{layer}", linewidth=1.4)
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
    axes.get_figure().colorbar(image, ax=axes, fraction=0.04, pad=0.02).ax.tick_params(labelsize=7)  # type: ignore[union-attr]


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
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
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


def _tick(value: float) -> str:
    """``0.25``, ``−2e−5``; nothing of what adding up ticks leaves in the last digits."""
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.6g}").replace("e+", "e").replace("-", "\u2212")
