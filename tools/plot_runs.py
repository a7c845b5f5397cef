"""Draw loss, sink rate and what the sink is worth over the steps of training runs, from their tables.

Works while a run is still training. A sweep stands for its runs; cells without numbers yet are listed.

    python tools/plot_runs.py sinklab-runs/emergence sinklab-runs/sigmoid --out emergence.png
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, ResultError
from sinklab.results.blocks import names
from sinklab.results.file import check_file, write_file
from sinklab.results.progress import say

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("-", "-.", ":", "--")
"""Of the lines of runs: where there are more runs than colours, the ten colours come again in the next style."""

SHARE_OF_QUERIES = 0.5
"""The mean weight on a key that few queries see is large by chance; positions that fewer than this share see are no sinks."""


def plot(folders: list[Path], *, out: Path | None = None, overwrite: bool = False) -> Path:
    """Write the figure to ``out`` (.png, .svg or .pdf), by default curves.png in the first folder, which is replaced."""
    check_file(out, overwrite)
    if not folders:
        raise InputError("give the output directory of at least one run or sweep")
    path = out or folders[0] / "curves.png"  # which is a name in a folder that is ours
    runs, missing = read_runs(folders)
    figure, suffix = draw_runs(runs), path.suffix.lstrip(".")
    if suffix not in figure.canvas.get_supported_filetypes():
        raise InputError(f"cannot write {path.name!r}: give a name that ends in .png, .svg or .pdf")
    write_file(path, lambda temporary: figure.savefig(temporary, format=suffix), overwrite=overwrite or out is None)
    if missing:
        say(f"Not drawn, as they have no numbers: {names(missing)}.")
    return path


@dataclasses.dataclass(frozen=True, eq=False)
class Curves:
    """The numbers of the whole model that a training run measured, by step.

    Attributes:
        label: the folder's name, of a cell without its digest, and the operation.
        table: rows of its long table without a layer.
        sink: position with the largest sink rate at the last measurement, 0-based, among those that at least
            :data:`SHARE_OF_QUERIES` of the queries see.
    """

    label: str
    table: pd.DataFrame
    sink: int

    def series(self, probe: str, metric: str, key_position: int | None = None) -> pd.Series:
        """Values of one number by step; empty when it was not measured."""
        rows = self.table[(self.table["probe"] == probe) & (self.table["metric"] == metric)]
        rows = rows[rows["key_position"].isna() if key_position is None else rows["key_position"] == key_position]
        return rows.set_index("step")["value"].astype(float).sort_index()


def read_curves(folder: Path) -> Curves:
    """The curves of a run's output directory."""
    from sinklab.results.table import read_run, read_table

    run, table = read_run(folder), read_table(folder / "table.parquet")
    if not table["step"].notna().any():
        raise InputError(
            f"{folder}, a run of {run.get('kind', 'another command')}, has no numbers by step; give the output directory of "
            "'sinklab pretrain' or of a run in a sweep"
        )
    name, operations = re.sub(r"(=.*)-[0-9a-f]+$", r"\1", folder.resolve().name), table["operation"].dropna()
    label = name if operations.empty or operations.iloc[-1] in name else f"{name} ({operations.iloc[-1]})"
    table = table[table["layer"].isna()]
    rates = table[(table["probe"] == "sink_rate") & (table["metric"] == "gu2024")]
    seen = rates[rates["key_position"] <= rates["key_position"].max() * (1.0 - SHARE_OF_QUERIES)]
    last = seen[seen["step"] == seen["step"].max()].set_index("key_position")["value"]
    return Curves(label, table, int(last.idxmax()) if len(last) else 0)


def read_runs(folders: Sequence[Path]) -> tuple[list[Curves], list[str]]:
    """The runs in some folders, each once, and the names of cells of sweeps that have no numbers yet."""
    from sinklab.results.table import read_run

    runs: dict[Path, Curves] = {}
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


def draw_runs(runs: Sequence[Curves]) -> Figure:
    """One figure of all runs together: loss, sink rate (of a null score dashed), and loss gap."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 3.6 + 0.2 * len(runs)), layout="constrained", dpi=130)
    loss, rate, gap = figure.subplots(1, 3)
    for index, run in enumerate(runs):
        style = {"color": f"C{index % 10}", "linestyle": STYLES[index // 10 % len(STYLES)]}
        _line(loss, run.series("training", "train_loss"), style | {"alpha": 0.4, "linewidth": 0.8})
        _line(loss, run.series("training", "held_out_loss"), style | {"label": run.label})
        _line(rate, run.series("sink_rate", "gu2024", run.sink), style | {"label": f"{run.label}, position {run.sink}"})
        # The mass on a sink logit or key bias is the same kind of sink at no position of the text.
        null = style | {"linestyle": "--", "marker": "x", "label": f"{run.label}, null score"}
        _line(rate, run.series("sink_rate", "gu2024_null"), null)
        _line(gap, run.series("sink_readout", "sink_loss_gap"), style | {"label": run.label})
    _finish(loss, "loss (strong: held-out; faint: training)", "nats per token")
    _finish(rate, "sink rate (Gu et al. 2024)", "% of heads and samples")
    _finish(gap, "what the sink is worth to a windowed model", "nats per token")
    gap.axhline(0.0, color="#8c959f", linewidth=0.8)
    if rate.lines:
        rate.set_ylim(0.0, max(5.0, rate.get_ylim()[1]))  # a rate that never leaves zero should look like zero
    lines = (rate if rate.lines else loss).get_lines()
    named = [line for line in lines if not str(line.get_label()).startswith("_")]
    figure.legend(handles=named, loc="outside upper center", ncols=2, fontsize=8, frameon=False, handlelength=4)
    return figure


def _line(axes: Axes, points: pd.Series, style: Mapping[str, Any]) -> None:
    if len(points):
        # A line of one point is not to be seen.
        axes.plot(points.index, points, **{"marker": "o" if len(points) == 1 else "", "markersize": 4, **style})


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="output directories of 'sinklab pretrain' or 'sinklab sweep'")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args()
    print(plot(given.folders, out=given.out, overwrite=given.overwrite))
