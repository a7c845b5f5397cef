"""The command ``sinklab retrieval``: heads that must look something up at one token, and be silent at all others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.cli import output
from sinklab.cli.libraries import prepare_libraries
from sinklab.cli.options import Json, Overwrite

__all__ = ["EPILOG", "retrieval"]

EPILOG = (
    "Off the trigger a softmax head has to park its weight, and does so on BOS. relu:power=0 is undivided ReLU, which solves "
    "the task exactly; ReLU that is divided by a number of keys provably cannot. docs/retrieval.md has the proofs.\n\n"
    "Examples:\n\n"
    "sinklab retrieval\n\n"
    "sinklab retrieval --target token --seeds 0 --json\n\n"
    "sinklab retrieval --operation 'softmax,softpick,sink_logit' --seeds 0..2 --out build/retrieval"
)

COLUMNS = {
    "error": "largest error",
    "before_bos_mean": "on BOS before the trigger",
    "before_bos_min": "least",
    "behind_bos_mean": "behind it",
    "trigger_asked": "trigger on what it asks for",
    "trigger_bos": "on BOS",
}
"""Numbers of a run that the table shows, with their headings."""


def retrieval(
    operation: Annotated[
        str,
        typer.Option(metavar="NAME[,NAME…]", help="From 'sinklab list operations', with settings if need be: relu:power=0."),
    ] = "softmax,relu:power=0",
    target: Annotated[
        Literal["value", "token"],
        typer.Option(help="What the trigger answers: the value of the token asked for, or all of it."),
    ] = "value",
    seeds: Annotated[
        str, typer.Option(metavar="0..2", help="Of initial weights and data; both ends included, or a list.")
    ] = "0..2",
    length: Annotated[int, typer.Option(help="Tokens of a sequence, BOS included; at least 4.")] = 16,
    keys: Annotated[int, typer.Option(help="Number of keys; at least the length less two.")] = 16,
    values: Annotated[int, typer.Option(help="Coordinates of a value.")] = 4,
    position: Annotated[int, typer.Option(help="Place of the trigger in the evaluation, counted from 0.")] = 7,
    cap: Annotated[int, typer.Option(help="Largest number of steps.")] = 50_000,
    out: Annotated[Path | None, typer.Option(help="Directory for table.parquet, runs.json and run.json.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train one head to look up a key at one token and to be silent elsewhere, and say where its weight goes."""
    prepare_libraries()
    from sinklab.arguments import parse_seeds
    from sinklab.registry import split_specs
    from sinklab.trigger.lab import named
    from sinklab.trigger.retrieval import RetrievalSetting
    from sinklab.trigger.retrieval_lab import run_retrieval_lab

    chosen = [named(name) for name in split_specs(operation)]
    setting = RetrievalSetting(length=length, keys=keys, values=values, position=position, target=target, cap=cap)
    with output.progress() as progress:
        runs = run_retrieval_lab(chosen, parse_seeds(seeds), setting, out=out, overwrite=overwrite, progress=progress)
    if as_json:
        output.print_json({"runs": runs})
        return
    _print(runs)
    if out is not None:
        typer.echo(f"\ntable  {out / 'table.parquet'}")


def _print(runs: list[dict[str, Any]]) -> None:
    console = Console(soft_wrap=True, highlight=False, width=None if Console().is_terminal else output.PIPE_WIDTH)
    shown = Table(box=None, pad_edge=False)
    for heading in ("operation", "seed", "steps", *COLUMNS.values()):
        shown.add_column(heading, justify="left" if heading == "operation" else "right")
    why = {"solved": "", "cap": ", did not stop", "diverged": ", diverged"}
    for run in runs:
        numbers = ["–" if run[name] is None else f"{run[name]:.4f}" for name in COLUMNS]
        shown.add_row(escape(run["operation"]), str(run["seed"]), f"{run['steps']:,}{why[run['outcome']]}", *numbers)
    console.print(shown)
