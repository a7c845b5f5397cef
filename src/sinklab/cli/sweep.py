"""The command ``sinklab sweep``: a recipe over a grid of settings and seeds, on this machine or on a Ray cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.arguments import WHOLE, AsJson, command
from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from sinklab.jobs.sweep import SweepResult

__all__ = ["sweep"]


@command
def sweep(
    recipe: str,
    *,
    grid: Annotated[list[str] | None, WHOLE] = None,
    seeds: str | None = None,
    changes: Annotated[list[str] | None, "--set", WHOLE] = None,
    out: Path | None = None,
    jobs: int | None = None,
    retries: int = 2,
    ray: str | None = None,
    resume: bool = False,
    cache: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe over a grid of settings and seeds, and say what the seeds agree on.

    Writes a run folder per cell, and table.parquet and cells.csv of all of them, into the output directory. A cell that
    diverges is a result. Status 1: cells failed, and the others' results are kept.

    Args:
        recipe: A name from 'sinklab list recipes', FILE.py[:FUNCTION], or the run.json or YAML of a run.
        grid: Values of a field, in YAML; repeatable, all combinations are run. The last parts of a path will do where they name
            one field; lr, operation, position, optimizer, schedule, layers, heads and context are short names.
        seeds: Run every combination with each of these seeds (of initialisation and data); both ends included; by default the
            recipe's.
        changes: Change a field in all cells, such as training.steps=500; repeatable.
        out: Output directory; by default sinklab-sweeps/<recipe>.
        jobs: Cells at a time; by default one per GPU, or cores over training.threads.
        retries: How often a cell that was killed goes on from its last checkpoint.
        ray: Run on a Ray cluster; the output directory must be shared by its nodes.
        resume: Go on with the sweep in the output directory; what has ended is kept.
        cache: Directory for encoded text; by default ~/.cache/sinklab, with --ray OUT/cache.

    Examples:
        sinklab sweep tiny --grid lr=1e-3,4e-3 --seeds 0..2
        sinklab sweep emergence --grid operation=softmax,sigmoid --grid optimizer.weight_decay=0,0.1 --seeds 0..4 --jobs 2
        sinklab sweep emergence --grid 'model.operation={name: sigmoid, normalize: true},{name: softmax}'
        sinklab sweep emergence --grid lr=1e-3,4e-3 --seeds 0..9 --resume  (after Ctrl-C, or to add seeds)
        sinklab sweep emergence --grid lr=1e-3,4e-3 --seeds 0..4 --ray auto --out /shared/sweep
    """
    quiet_libraries()
    from sinklab.arguments import parse_seeds
    from sinklab.jobs.grid import parse_grid
    from sinklab.jobs.sweep import sweep as run
    from sinklab.training.resolve import resolve_recipe

    config = resolve_recipe(recipe)
    result = run(
        config,
        parse_grid(grid or []),
        Path("sinklab-sweeps") / config.name if out is None else out,
        seeds=None if seeds is None else parse_seeds(seeds),
        changes=changes or [],
        jobs=jobs,
        retries=retries,
        ray=ray,
        resume=resume,
        cache=cache,
    )
    if as_json:
        output.print_json({"folder": str(result.folder), "settings": result.settings, "failed": result.errors})
    else:
        _print_result(result)
    for name, error in result.errors.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    if result.errors:
        raise SystemExit(1)


def _print_result(result: SweepResult) -> None:
    """One row per combination of settings, and where the rest is."""
    from sinklab.jobs.grid import short_label

    shown = Table(box=None, pad_edge=False)
    paths = list(result.settings[0]["settings"])
    for heading in (*(short_label(path) for path in paths), "runs", "held-out loss (nats)", "sink rate (%)"):
        shown.add_column(escape(heading))
    for row in result.settings:
        values = (escape(str(row["settings"][path])) for path in paths)
        shown.add_row(*values, _runs(row), _spread(row["held_out_loss"], ".3f"), _spread(row["sink_rate"], ".2f"))
    Console(soft_wrap=True, highlight=False).print(shown)
    print(f"\ncells  {result.folder / 'cells.csv'}\ntable  {result.folder / 'table.parquet'}")


def _runs(row: dict[str, Any]) -> str:
    others = ((row["diverged"], "diverged"), (row["other"], "failed or unfinished"))
    return ", ".join([str(row["finished"]), *(f"{count} {word}" for count, word in others if count)])


def _spread(number: dict[str, Any], form: str) -> str:
    """``mean ± half the width of its 95 % interval``, or the values where there are fewer than three."""
    if "mean" not in number:
        return ", ".join(format(value, form) for value in number["values"]) or "–"
    return f"{number['mean']:{form}} ± {number['interval'][1] - number['mean']:{form}}"
