"""The command ``sinklab pathways``: which ways to do nothing leave a model undistorted, at equal compute and data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries
from sinklab.studies.arguments import AsJson, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sinklab.studies.pathways.judging import Row

__all__ = ["pathways"]


@command
def pathways(
    *,
    operations: str | None = None,
    seeds: str = "0..2",
    scale: Literal["tiny", "small", "60m", "1b"] = "tiny",
    out: Path = Path("sinklab-pathways"),
    store: Path = Path("sinklab-claims"),
    jobs: int | None = None,
    ray: str | None = None,
    retries: int = 2,
    cache: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Train operations that let a head do nothing, and say what each costs and distorts.

    Three trainings an operation and seed. What has been trained and read out is kept: the same command goes on. Prints one
    table and a paragraph. Status 1: trainings failed, and the others' results are kept.

    docs/pathways.md has the columns, the settings of the operations, and what low-distortion means.

    Args:
        operations: From 'sinklab list operations'; a name alone has the settings of its paper. Softmax is always there; by
            default the twelve of docs/pathways.md.
        seeds: Both ends included, or a list; three or more for an answer.
        scale: What is trained; tiny needs one core and seconds a run.
        out: Directory for table.parquet, run.json, pareto.svg and pathways.md.
        store: Where trained models are kept; that of 'sinklab reproduce', so that none is trained twice.
        jobs: Processes at a time; by default one per GPU, or cores over threads.
        ray: Train on a Ray cluster; the store must be shared by its nodes.
        retries: How often a training that was killed goes on from its last checkpoint.
        cache: Directory for encoded text; by default ~/.cache/sinklab, with --ray STORE/cache.

    Examples:
        sinklab pathways
        sinklab pathways --operations softpick,gated --seeds 0 --jobs 2  (a first look)
        sinklab pathways --operations 'sigmoid(length_bias=true),sink_logit' --seeds 0..4 --out build/pathways
        sinklab pathways --scale 60m --ray auto --store /shared/claims
    """
    quiet_libraries()
    from sinklab.registry import operations as registry
    from sinklab.registry import split_specs
    from sinklab.studies.arguments import parse_seeds
    from sinklab.studies.pathways.benchmark import run_pathways
    from sinklab.studies.pathways.operations import DEFAULT

    chosen = None if operations is None else [registry.read(name) for name in split_specs(operations)]
    with output.progress() as progress:
        result = run_pathways(
            DEFAULT if chosen is None else chosen,
            seeds=parse_seeds(seeds),
            scale=scale,
            out=out,
            store=store,
            jobs=jobs,
            ray=ray,
            retries=retries,
            cache=cache,
            stages=progress,
        )
    if as_json:
        rows = [row.to_dict() for row in result.rows]
        output.print_json({"rows": rows, "cannot": result.cannot, "paragraph": result.paragraph, "errors": result.errors})
    else:
        _print(result.rows)
        print(f"\n{result.paragraph}\n\nplot   {out / 'pareto.svg'}\ntable  {out / 'table.parquet'}")
    for error in result.errors:
        print(f"failed: {error}", file=sys.stderr)
    if result.errors:
        raise SystemExit(1)


def _print(rows: Sequence[Row]) -> None:
    """Means alone, one line a column, so that twelve operations fit; intervals are in pathways.md."""
    from sinklab.studies.pathways.columns import COLUMNS

    shown = Table(box=None, pad_edge=False)
    shown.add_column("mean over seeds")
    for row in rows:
        shown.add_column(escape(row.label), justify="right")
    shown.add_row("low-distortion", *("reference" if number == 0 else row.answer for number, row in enumerate(rows)))
    for column in COLUMNS:
        if any(column.name in row.numbers for row in rows):
            cells = (format(row.numbers[column.name].mean, column.form) if column.name in row.numbers else "–" for row in rows)
            shown.add_row(f"{column.heading} ({column.metric.unit})", *cells)
    Console(soft_wrap=True, highlight=False, width=None if Console().is_terminal else output.PIPE_WIDTH).print(shown)
