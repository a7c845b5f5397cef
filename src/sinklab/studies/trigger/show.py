"""What ``sinklab trigger`` shows: a row for each run, and what was not trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.results.blocks import Block, Grid, Say

__all__ = ["show"]

COLUMNS = {
    "trigger": {
        "max_error": "largest error",
        "bos_weight_mean": "on BOS, mean",
        "bos_weight_min": "least",
        "bos_weight_bound": "bound",
        "nothing_mean": "null mass",
        "trigger_bos_weight": "trigger on BOS",
    },
    "retrieval": {
        "max_error": "largest error",
        "before_bos_mean": "on BOS before the trigger",
        "before_bos_min": "least",
        "behind_bos_mean": "behind it",
        "trigger_asked": "trigger on what it asks for",
        "trigger_bos": "on BOS",
    },
}
"""Numbers of a run that the table of a task shows, with their headings."""

WHY = {"solved": "", "cap": ", did not stop", "diverged": ", diverged"}


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """One table; where models have several heads, with how many of them sink."""
    columns, runs = COLUMNS[summary["task"]], summary["runs"]
    several = any(run.get("layers", 1) * run.get("heads", 1) > 1 for run in runs)
    rows = []
    for run in runs:
        cells = [run["operation"], run["seed"], f"{run['steps']:,}{WHY[run['outcome']]}"]
        cells += [None if run[name] is None else f"{run[name]:.4f}" for name in columns]
        if several:
            sinking = run["sinking_heads"]
            cells.append(None if sinking is None else f"{len(sinking)} of {run['layers'] * run['heads']}")
        rows.append(cells)
    yield Grid(["operation", "seed", "steps", *columns.values(), *(["heads that sink"] if several else [])], rows)
    for entry in summary["cannot"]:
        yield Say(f"{entry['operation']} was not trained: every choice of maps is off by {entry['least_error']:.3g} or more.")
        yield Say(f"{entry['reason']} (--anyway trains it)", small=True)
