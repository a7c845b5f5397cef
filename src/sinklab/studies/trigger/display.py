"""What the terminal shows of ``sinklab trigger`` and ``sinklab retrieval``: a row a run, and what was not trained."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.run import Result

__all__ = ["display"]

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
"""Numbers of a run that the table of a kind shows, with their headings."""


def display(result: Result) -> Iterator[RenderableType]:
    """One table; where models have several heads, with how many of them sink."""
    columns, runs = COLUMNS[result.kind], result.summary["runs"]
    several = any(run.get("layers", 1) * run.get("heads", 1) > 1 for run in runs)
    shown = Table(box=None, pad_edge=False)
    for heading in ("operation", "seed", "steps", *columns.values(), *(["heads that sink"] if several else [])):
        shown.add_column(heading, justify="left" if heading == "operation" else "right")
    why = {"solved": "", "cap": ", did not stop", "diverged": ", diverged"}
    for run in runs:
        cells = [escape(run["operation"]), str(run["seed"]), f"{run['steps']:,}{why[run['outcome']]}"]
        cells += ["–" if run[name] is None else f"{run[name]:.4f}" for name in columns]
        if several:
            sinking = run["sinking_heads"]
            cells.append("–" if sinking is None else f"{len(sinking)} of {run['layers'] * run['heads']}")
        shown.add_row(*cells)
    yield shown
    for entry in result.summary["cannot"]:
        yield Text(
            f"\n{entry['operation']} was not trained: {entry['reason']}; every choice of maps is off by "
            f"{entry['least_error']:.3g} or more somewhere (--anyway trains it)"
        )
    if result.folder is not None:
        yield Text(f"\ntable  {result.folder / 'table.parquet'}")
