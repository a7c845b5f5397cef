"""The runs of pre-training that a figure shows: numbers by step, cells of a sweep, and what tells runs apart."""

from __future__ import annotations

import csv
import dataclasses
import functools
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sinklab.errors import InputError, ResultError
from sinklab.results.table import read_run, read_table

SHARE_OF_QUERIES = 0.5
"""The mean weight on a key that few queries see is large by chance; positions that fewer than this share see are no sinks."""

DRAWN = ("gu2024", "gu2024_null", "held_out_loss", "train_loss", "sink_loss_gap")
"""Metrics whose lines stand beside those of other runs."""

MEASURED_BY = {
    "watch": ("threshold", "window", "seq_len", "samples"),
    "data": ("corpus", "tokenizer", "vocab_size", "bos", "eos", "held_out_rows"),
    "model": ("max_position_embeddings",),
}
"""Settings that decide how a rate is taken, in which tokens a loss is, and of which rows."""

MOST_NAMES = 6
"""Runs that a note names; of more, it says how many there are."""


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
        folder: where it was read, absolute.
        measured: how its numbers were taken: the settings of :data:`MEASURED_BY`, and versions of what is drawn, as far as
            they were recorded.
    """

    name: str
    operation: str
    table: pd.DataFrame
    sink: int
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    folder: Path = Path()
    measured: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def series(self, probe: str, metric: str, key_position: int | None = None) -> Points:
        """Steps and values of one number of the whole model; empty when it was not measured."""
        table = self._whole_model
        rows = table[(table["probe"] == probe) & (table["metric"] == metric)]
        rows = rows[rows["key_position"].isna() if key_position is None else rows["key_position"] == key_position]
        rows = rows.sort_values("step")
        return rows["step"].to_numpy(np.int64), rows["value"].to_numpy(np.float64)

    def profile(self) -> pd.DataFrame:
        """Sink rate in percent by position (rows) and step (columns); late positions, which few queries see, are left out."""
        rows = self._rate.query("layer.isna() and key_position.notna()")
        rows = rows[_seen_by_enough(rows)]
        return rows.pivot(index="key_position", columns="step", values="value").sort_index()

    def heads(self) -> pd.DataFrame:
        """Sink rate in percent at :attr:`sink` by layer and head (rows) and step (columns)."""
        return self._heads

    def layers(self) -> pd.DataFrame:
        """Sink rate in percent at :attr:`sink` by layer (rows) and step (columns), the mean over its heads."""
        return self._heads.groupby(level="layer").mean()

    @functools.cached_property
    def _heads(self) -> pd.DataFrame:
        rows = self._rate
        rows = rows[rows["head"].notna() & (rows["key_position"] == self.sink)]
        return rows.pivot(index=["layer", "head"], columns="step", values="value").sort_index()

    @functools.cached_property
    def _whole_model(self) -> pd.DataFrame:
        return self.table[self.table["layer"].isna()]

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
    place = folder.resolve()
    return RunCurves(
        name=place.name, operation=operation, table=table, sink=sink, settings=_settings(folder), folder=place,
        measured=_measured(run, table),
    )  # fmt: skip


def _measured(run: Mapping[str, object], table: pd.DataFrame) -> dict[str, object]:
    config = run.get("config")
    config = config if isinstance(config, dict) else {}
    known: dict[str, object] = {}
    for part, names in MEASURED_BY.items():
        of_part = config.get(part)
        known |= {f"{part}.{name}": of_part[name] for name in names if isinstance(of_part, dict) and name in of_part}
    drawn = table[table["metric"].isin(DRAWN) & table["version"].notna()]
    versions = drawn.groupby("metric")["version"].max()
    return known | {f"the definition of {name}": f"version {version}" for name, version in versions.items()}


def _seen_by_enough(rates: pd.DataFrame) -> pd.Series:
    return rates["key_position"] <= rates["key_position"].max() * (1.0 - SHARE_OF_QUERIES)


def read_runs(folders: Sequence[Path]) -> tuple[list[RunCurves], str]:
    """The runs in some folders, each once, and a sentence on cells of sweeps that have no numbers."""
    runs: dict[Path, RunCurves] = {}
    why: dict[str, list[str]] = {}
    sweeps = [folder for folder in folders if _is_sweep(folder)]
    for folder in folders:
        if folder not in sweeps:
            runs[folder.resolve()] = read_curves(folder)
            continue
        failed = _failures(folder)
        for cell in _cells(folder):
            try:
                runs[cell.resolve()] = read_curves(cell)
            except (InputError, ResultError) as error:
                name = cell.name if len(sweeps) == 1 else f"{folder.name}/{cell.name}"
                why.setdefault(failed.get(cell.name) or _state(cell, error), []).append(name)
    parts = "; ".join(f"{listed(names)} ({reason})" for reason, names in why.items())
    if not runs and parts:
        raise InputError(f"no cell of the sweep in {sweeps[0]} has numbers to draw: {parts}")
    return list(runs.values()), f"Not drawn: {parts}." if parts else ""


def _is_sweep(folder: Path) -> bool:
    return not (folder / "run.json").is_file() and (folder / "sweep.json").is_file()


def _cells(folder: Path) -> list[Path]:
    """Folders of the cells of a sweep, in the order of its plan."""
    planned = read_run(folder, "sweep.json").get("cells")
    names = [str(cell["name"]) for cell in planned or [] if isinstance(cell, dict) and cell.get("name")]
    others = sorted(path.parent.name for path in folder.glob("*/run.json"))
    if not names and not others:
        raise InputError(f"the sweep in {folder} has no run yet: none of its cells has written a run.json")
    return [folder / name for name in dict.fromkeys([*names, *others])]


def _failures(folder: Path) -> dict[str, str]:
    """Cells of a sweep that failed when it last ended, and what they died of."""
    if not (folder / "cells.csv").is_file():
        return {}
    with (folder / "cells.csv").open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("status") == "failed"]
    return {str(row.get("cell")): _failed(row.get("error")) for row in rows}


def _failed(error: object) -> str:
    return f"failed: {textwrap.shorten(str(error), 100)}" if error else "failed"


def _state(cell: Path, error: Exception) -> str:
    """Why a cell has no numbers to draw."""
    if not (cell / "run.json").is_file():
        return "not begun"
    try:
        run = read_run(cell)
        status = run.get("status", "begun")
        if status == "failed" and run.get("error"):
            return _failed(run["error"])
        if not (cell / "table.parquet").is_file() or not read_table(cell / "table.parquet")["step"].notna().any():
            return f"{status}, nothing measured yet"
    except (InputError, ResultError) as unreadable:
        return str(unreadable)
    return str(error)


def listed(names: Sequence[str]) -> str:
    """Names, a few in words and of the others how many."""
    more = len(names) - MOST_NAMES
    return "; ".join(names) if more < 2 else f"{'; '.join(names[:MOST_NAMES])} and {more} more"


def _settings(folder: Path) -> dict[str, object]:
    """What a sweep varies in the cell of this folder, from the plan next to it."""
    plan = folder.resolve().parent / "sweep.json"
    cells = read_run(plan.parent, plan.name).get("cells") if plan.is_file() else None
    for cell in cells if isinstance(cells, list) else []:
        if isinstance(cell, dict) and cell.get("name") == folder.resolve().name and isinstance(cell.get("settings"), dict):
            return {**cell["settings"], "seed": cell.get("seed")}
    return {}


WIDTH = 46
"""Characters of a title over a third of the figure."""


def labels_of(runs: Sequence[RunCurves]) -> list[str]:
    """The operations, where they tell the runs apart; or the settings of a sweep that differ, and its folder where there are
    several sweeps; or else the folders' names, with the operation.
    """
    operations = [run.operation for run in runs]
    if len(set(operations)) == len(runs) > 1:
        return operations
    labels = _by_settings(runs)
    several = Counter(labels)
    unnamed = [index for index, label in enumerate(labels) if not label or several[label] > 1]
    for index, label in zip(unnamed, _by_folder([runs[index] for index in unnamed]), strict=True):
        labels[index] = label
    # Labels differ at their ends as often as at their beginnings.
    short = [label if len(label) <= 2 * WIDTH else f"{label[: WIDTH - 1]}…{label[-WIDTH:]}" for label in labels]
    return short if len(set(short)) == len(set(labels)) else labels


def _by_settings(runs: Sequence[RunCurves]) -> list[str]:
    """The settings of a sweep that differ, behind its folder where there are several; empty for runs of no sweep."""
    every = list(dict.fromkeys(path for run in runs for path in run.settings))
    differing = [path for path in every if len({_value(run.settings.get(path)) for run in runs if run.settings}) > 1]
    sweeps = _tell_apart({run.folder.parent for run in runs if run.settings})
    labels = []
    for run in runs:
        shown = {path: run.settings[path] for path in differing or every if path in run.settings}
        label = ", ".join(f"{_word(path, every)}={_value(value)}" for path, value in shown.items())
        labels.append(f"{sweeps[run.folder.parent]}: {label}" if label and len(sweeps) > 1 else label)
    return labels


def _by_folder(runs: Sequence[RunCurves]) -> list[str]:
    """The names of the runs, or of as many folders as tell those of one name apart, with the operation unless it is in them."""
    names = Counter(run.name for run in runs)
    folders = _tell_apart({run.folder for run in runs if names[run.name] > 1})
    labels = [folders.get(run.folder, run.name) for run in runs]
    return [label if run.operation in label else f"{label} ({run.operation})" for run, label in zip(runs, labels, strict=True)]


def _tell_apart(folders: Collection[Path]) -> dict[Path, str]:
    """Each folder by the last part of its path, or by as many for all as tell them apart."""
    length = 1
    while len({folder.parts[-length:] for folder in folders}) < len(folders):
        length += 1
    return {folder: "/".join(folder.parts[-length:]).replace("//", "/") for folder in folders}


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
