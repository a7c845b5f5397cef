"""Curves of pre-training: loss, sink rate and what the sink is worth over steps, and maps of where the sinks are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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

__all__ = ["RunCurves", "draw_runs", "read_curves", "write_plot"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which people with any kind of colour vision tell apart; black comes last."""

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
    """

    name: str
    operation: str
    table: pd.DataFrame
    sink: int

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
    return RunCurves(name=folder.resolve().name, operation=operation, table=table, sink=sink)


def _seen_by_enough(rates: pd.DataFrame) -> pd.Series:
    return rates["key_position"] <= rates["key_position"].max() * (1.0 - SHARE_OF_QUERIES)


def draw_runs(runs: Sequence[RunCurves]) -> Figure:
    """One figure: loss, sink rate and loss gap of all runs together; below, for every run, its layers, heads and positions."""
    from matplotlib.figure import Figure

    mapped = [(run, label) for run, label in zip(runs, _labels(runs), strict=True) if len(run.heads())][:MOST_MAPS]
    height = 3.4 + 2.6 * len(mapped)
    figure = Figure(figsize=(13.0, height), layout="constrained", dpi=130)
    grid = figure.add_gridspec(1 + len(mapped), 3, height_ratios=[1.25] + [1.0] * len(mapped))
    top = [figure.add_subplot(grid[0, column]) for column in range(3)]
    labels = _labels(runs)
    for run, label, colour in zip(runs, labels, _colours(len(runs)), strict=True):
        _draw_losses(top[0], run, label, colour)
        _draw_rates(top[1], run, label, colour)
        _line(top[2], run.series("sink_readout", "sink_loss_gap"), colour, label)
    _finish(top[0], "loss", "nats per token", legend="strong: held-out; faint: training")
    _finish(top[1], "sink rate (Gu et al. 2024)", "% of heads and samples", floor=0.0)
    _finish(top[2], "what the sink is worth to a windowed model", "nats per token")
    top[2].axhline(0.0, color="#8c959f", linewidth=0.8)
    handles, labels = top[1].get_legend_handles_labels()
    if handles:
        top[1].legend(handles, labels, fontsize=8, frameon=False)
    for row, (run, label) in enumerate(mapped, start=1):
        layers, heads, profile = (figure.add_subplot(grid[row, column]) for column in range(3))
        _draw_layers(layers, run, label)
        _draw_map(heads, run.heads(), f"{label}: heads, sink rate at position {run.sink}", "layer.head", heads=True)
        _draw_map(profile, run.profile(), f"{label}: positions, whole model", "key position", heads=False)
    return figure


def write_plot(folders: Sequence[Path], out: Path, *, overwrite: bool = False) -> Path:
    """Draw the runs in ``folders`` to ``out``; the suffix decides the format (png, svg, pdf).

    A folder of a sweep stands for its cells.

    Args:
        overwrite: replace a file that is there.

    Raises:
        InputError: a folder without a run, a suffix that matplotlib cannot write, or something at ``out`` that is not replaced
            (:func:`~sinklab.results.file.check_file`).
    """
    check_file(out, overwrite)
    runs = [read_curves(cell) for folder in folders for cell in _cells(folder)]
    figure = draw_runs(runs)
    formats = figure.canvas.get_supported_filetypes()
    if out.suffix.lstrip(".") not in formats:
        raise InputError(f"cannot write {out.name!r}: give a name that ends in .png, .svg or .pdf")
    write_file(out, lambda temporary: figure.savefig(temporary, format=out.suffix.lstrip(".")), overwrite=overwrite)
    return out


def _cells(folder: Path) -> list[Path]:
    if (folder / "run.json").is_file() or not (folder / "sweep.json").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/run.json"))


def _colours(number: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(number)]


def _labels(runs: Sequence[RunCurves]) -> list[str]:
    """The operations, where they tell the runs apart; otherwise the names of the folders, with the operation."""
    operations = [run.operation for run in runs]
    if len(set(operations)) == len(runs) > 1:
        return operations
    return [run.name if run.operation in run.name else f"{run.name} ({run.operation})" for run in runs]


def _line(axes: Axes, points: Points, colour: str, label: str | None, **style: Any) -> None:
    if len(points[0]):
        axes.plot(*points, color=colour, label=label, linewidth=style.pop("linewidth", 1.8), **style)


def _draw_losses(axes: Axes, run: RunCurves, label: str, colour: str) -> None:
    _line(axes, run.series("training", "train_loss"), colour, None, linewidth=0.8, alpha=0.4)
    _line(axes, run.series("training", "held_out_loss"), colour, label, marker="o", markersize=3)


def _draw_rates(axes: Axes, run: RunCurves, label: str, colour: str) -> None:
    _line(axes, run.series("sink_rate", "gu2024", run.sink), colour, f"{label}, position {run.sink}")
    # The mass on a sink logit or key bias is the same kind of sink at no position of the text.
    _line(axes, run.series("sink_rate", "gu2024_null"), colour, f"{label}, null score", linestyle="--")


def _draw_layers(axes: Axes, run: RunCurves, label: str) -> None:
    from matplotlib import colormaps

    layers = run.layers()
    for index, (layer, values) in enumerate(layers.iterrows()):
        shade = colormaps["viridis"](index / max(1, len(layers) - 1) * 0.92)
        axes.plot(values.index.to_numpy(np.int64), values.to_numpy(np.float64), color=shade, label=f"{layer}", linewidth=1.4)
    _finish(axes, f"{label}: layers, sink rate at position {run.sink}", "% of heads and samples", floor=0.0)
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


def _finish(axes: Axes, title: str, label: str, *, floor: float | None = None, legend: str = "") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, fontsize=10 if legend else 9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    if floor is not None:
        # A rate that never leaves zero should look like zero, not like noise blown up to fill the axes.
        axes.set_ylim(floor, max(5.0, axes.get_ylim()[1]))
    if legend:
        axes.legend(title=legend, fontsize=8, title_fontsize=8, frameon=False)
