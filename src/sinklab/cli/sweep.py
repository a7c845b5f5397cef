"""The command ``sinklab sweep``: a recipe over a grid of settings and seeds, on this machine or on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.cli import output
from sinklab.cli.libraries import prepare_libraries

if TYPE_CHECKING:
    from sinklab.jobs.sweep import SweepResult

__all__ = ["EPILOG", "sweep"]

EPILOG = (
    "Examples:\n\n"
    "sinklab sweep tiny --grid lr=1e-3,4e-3 --seeds 0..2\n\n"
    "sinklab sweep emergence --grid operation=softmax,sigmoid --grid optimizer.weight_decay=0,0.1 --seeds 0..4 --jobs 2\n\n"
    "sinklab sweep emergence --grid 'model.operation={name: sigmoid, normalize: true},{name: softmax}'\n\n"
    "sinklab sweep emergence --grid lr=1e-3,4e-3 --seeds 0..9 --resume  (after Ctrl-C, or to add seeds)\n\n"
    "sinklab sweep emergence --grid lr=1e-3,4e-3 --seeds 0..4 --ray auto --out /shared/sweep"
)


def sweep(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A name from 'sinklab list recipes', FILE.py[:FUNCTION], or the run.json or YAML of a run."
        ),
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUE,…",
            help="Values of a field, in YAML; repeatable, all combinations are run. The last parts of a path will do where "
            "they name one field; lr, operation, position, optimizer, schedule, layers, heads and context are short names.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="0..4",
            help="Run every combination with each of these seeds (of initialisation and data); both ends included.",
            show_default="the recipe's",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change a field in all cells, such as training.steps=500; repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output directory.", show_default="sinklab-sweeps/<recipe>")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Cells at a time.", show_default="one per GPU, or cores over training.threads"),
    ] = None,
    retries: Annotated[int, typer.Option(help="How often a cell that was killed goes on from its last checkpoint.")] = 2,
    ray: Annotated[
        str | None,
        typer.Option(metavar="auto|ADDRESS", help="Run on a Ray cluster; the output directory must be shared by its nodes."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in the output directory; what has ended is kept.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(help="Directory for encoded text.", show_default="~/.cache/sinklab, with --ray OUT/cache"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout and nothing else there.")] = False,
) -> None:
    """Run a recipe over a grid of settings and seeds, and say what the seeds agree on.

    Writes a run folder per cell, and table.parquet and cells.csv of all of them, into the output directory. A cell that
    diverges is a result. Status 1: cells failed, and the others' results are kept.
    """
    prepare_libraries()
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
        typer.echo(f"failed: {name}: {error}", err=True)
    if result.errors:
        raise typer.Exit(1)


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
    typer.echo(f"\ncells  {result.folder / 'cells.csv'}\ntable  {result.folder / 'table.parquet'}")


def _runs(row: dict[str, Any]) -> str:
    others = ((row["diverged"], "diverged"), (row["other"], "failed or unfinished"))
    return ", ".join([str(row["finished"]), *(f"{count} {word}" for count, word in others if count)])


def _spread(number: dict[str, Any], form: str) -> str:
    """``mean ± half the width of its 95 % interval``, or the values where there are fewer than three."""
    if "mean" not in number:
        return ", ".join(format(value, form) for value in number["values"]) or "–"
    return f"{number['mean']:{form}} ± {number['interval'][1] - number['mean']:{form}}"
