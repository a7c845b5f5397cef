"""What runs are called in a figure: by what tells them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from sinklab.report.training_runs import RunCurves

__all__ = ["WIDTH", "labels_of"]

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
