"""The index of runs: one self-contained HTML file over all runs below a folder, to be filtered, compared and opened from."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from sinklab.errors import ConfigurationError, InputError
from sinklab.report.page import check_page, render
from sinklab.report.runs import IndexedRun, read_runs
from sinklab.results.blocks import number
from sinklab.results.file import check_file, write_file
from sinklab.results.run import Progress, silent

__all__ = ["render_index", "write_index"]

LEAST_REFRESH = 1.0
"""Seconds between two looks at the runs, at least: a folder of hundreds takes about that long to read."""

_SPARK = (96.0, 26.0)
"""Width and height of the small curve of a row, in pixels."""


def write_index(
    folder: Path, path: Path | None = None, *, refresh: float | None = None, progress: Progress = silent
) -> tuple[Path, list[IndexedRun]]:
    """Write one page over every run below a folder; whole or not at all, in the place of an earlier page of ours.

    Args:
        folder: where the runs are, at any depth.
        path: the page; ``index.html`` in the folder by default. Links to the runs are relative to it.
        refresh: seconds after which a browser reads the page again.
        progress: called for every run that is read.

    Returns:
        The page's path, and the runs in the order of the page.

    Raises:
        InputError: no such folder, no run below it, or what is at the path is no page of ours.
        ConfigurationError: ``refresh`` is below :data:`LEAST_REFRESH`.
    """
    if refresh is not None and not refresh >= LEAST_REFRESH:
        raise ConfigurationError(f"`refresh` is {refresh:g}, expected {LEAST_REFRESH:g} seconds or more")
    if not folder.is_dir():
        raise InputError(f"{folder} is no directory; give one that holds runs of sinklab, at any depth")
    path = folder / "index.html" if path is None else path
    check_file(path, overwrite=True)  # of what is there, a page of ours is replaced and nothing else
    check_page(path)
    runs = read_runs(folder, progress=progress)
    if not runs:
        raise InputError(f"no run is below {folder}: no run.json; give the directory that --out of your commands is in")
    text = render_index(runs, folder, path.parent, refresh=refresh)
    check_page(path)
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), overwrite=True)
    return path, runs


def render_index(runs: Sequence[IndexedRun], folder: Path, beside: Path, *, refresh: float | None = None) -> str:
    """The page as text.

    Args:
        runs: what is below ``folder``.
        beside: the directory that the page will be in.
        refresh: seconds after which a browser reads it again; ``None`` for never.
    """
    base = os.path.relpath(folder.absolute(), beside.absolute())
    kinds = Counter(run.kind for run in runs)
    # Rates above different thresholds do not compare; where all have one, it need not stand in every row.
    thresholds = {_threshold(run) for run in runs if run.number("gu2024") is not None}
    context = {
        "title": f"Runs in {folder.absolute().name}",
        "counts": [f"{kind} {count}" for kind, count in kinds.most_common()],
        "under_way": sum(run.status == "running" for run in runs),
        "kinds": sorted(kinds),
        "statuses": sorted({run.status for run in runs}),
        "refresh": refresh,
        "rows": [_row(run, base, name_threshold=len(thresholds) > 1) for run in runs],
    }
    return render("index.html.j2", context, {"page": "index", "runs": [_data(run) for run in runs]}, {})


def _threshold(run: IndexedRun) -> str:
    """Above which mean weight its heads are said to sink; empty where that is not recorded."""
    return next((value for name, value in run.settings.items() if name.rpartition(".")[2] == "threshold"), "")


def _row(run: IndexedRun, base: str, *, name_threshold: bool) -> Mapping[str, object]:
    def link(name: str) -> str:
        return quote(os.path.join(base, run.folder, name))

    return {
        "run": run,
        "name": run.model or run.folder,
        "finding": run.finding or _first_numbers(run),
        "loss": run.number("held_out_loss", "loss"),
        "rate": run.number("gu2024"),
        "above": (_threshold(run) or "unknown") if name_threshold else "",
        "when": run.created[:16].replace("T", " "),
        "took": _duration(run.seconds),
        "folder": link(""),
        "pages": [(page, link(page)) for page in run.pages if not (run.folder == "." and page == "index.html")],
        "spark": _spark(run),
    }


def _data(run: IndexedRun) -> dict[str, object]:
    """What the script compares."""
    compared = ("folder", "kind", "status", "settings", "tokens", "numbers", "curves", "versions")
    return {"name": run.model or run.folder, **{field: getattr(run, field) for field in compared}}


def _first_numbers(run: IndexedRun) -> str:
    """What stands for a finding where a command says none in words."""
    shown = list(run.numbers.items())[:3]
    return ", ".join(f"{name} {number(value)} {'' if unit in ('1', name) else unit}".rstrip() for name, (value, unit) in shown)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _spark(run: IndexedRun) -> tuple[str, str] | None:
    """The loss over steps as points of a small line, and what it says in words."""
    curve = run.curves.get("train_loss") or run.curves.get("held_out_loss")
    if curve is None:
        return None
    steps, values = curve
    width, height = _SPARK
    low, high = min(values), max(values)
    span, length = (high - low) or 1.0, (steps[-1] - steps[0]) or 1
    points = (
        f"{2 + (width - 4) * (step - steps[0]) / length:.1f},{2 + (height - 4) * (high - value) / span:.1f}"
        for step, value in zip(steps, values, strict=True)
    )
    return " ".join(points), f"loss from {values[0]:.3g} at step {steps[0]} to {values[-1]:.3g} at step {steps[-1]}"
