"""The command ``sinklab trigger``: which attention operations learn to attend to nobody, and what they use for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sinklab.cli import output
from sinklab.cli.libraries import prepare_libraries
from sinklab.cli.options import Json, Overwrite

__all__ = ["EPILOG", "trigger"]

EPILOG = (
    "The task and the stop rule are those of Ran-Milo 2026 (arXiv 2603.11487); relu without settings is the paper's, which "
    "divides by i - 1. docs/trigger.md explains the columns.\n\n"
    "Examples:\n\n"
    "sinklab trigger\n\n"
    "sinklab trigger --operation all --seeds 0 --out build/trigger\n\n"
    "sinklab trigger --operation softmax,relu --layers 2 --heads 2 --seeds 0..4 --out build/two  (half a minute a run)\n\n"
    "sinklab trigger --positions rotary --triggers 3\n\n"
    "sinklab trigger --operation 'softpick,sink_logit' --no-bos --json"
)


def trigger(
    operation: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="From 'sinklab list operations', with settings if need be: relu:uncounted=0; or all.",
        ),
    ] = "softmax,relu",
    layers: Annotated[int, typer.Option(help="Layers; more than one brings residual connections.")] = 1,
    heads: Annotated[int, typer.Option(help="Heads a layer, each of the full width.")] = 1,
    seeds: Annotated[
        str, typer.Option(metavar="0..2", help="Of initial weights and data; both ends included, or a list.")
    ] = "0..2",
    length: Annotated[int, typer.Option(help="Tokens of a sequence, BOS included; at least 4.")] = 16,
    width: Annotated[int, typer.Option(help="Coordinates of a token; at least 4.")] = 16,
    position: Annotated[
        int | None,
        typer.Option(
            help="Place of a trigger in the evaluation, counted from 0.", show_default="7, or the last of a short sequence"
        ),
    ] = None,
    target: Annotated[
        Literal["including", "preceding"],
        typer.Option(help="What the trigger averages: itself with the tokens before it (as released), or those before it."),
    ] = "including",
    triggers: Annotated[
        int, typer.Option(help="In each sequence, at distinct places; each averages the earlier ones with the content.")
    ] = 1,
    positions: Annotated[
        str, typer.Option(metavar="NAME", help="Position scheme, from 'sinklab list positions'.")
    ] = "no_position",
    bos: Annotated[bool, typer.Option(help="Begin sequences with BOS.")] = True,
    start: Annotated[
        Literal["random", "construction"],
        typer.Option(help="Small random maps (as released), or the exact solution with noise; softmax and relu, one head."),
    ] = "random",
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise on the exact solution.")] = 0.02,
    tolerance: Annotated[float, typer.Option(help="Training stops when no coordinate of a batch is off by as much.")] = 5e-3,
    cap: Annotated[int, typer.Option(help="Largest number of steps.")] = 50_000,
    anyway: Annotated[bool, typer.Option("--anyway", help="Train operations that provably cannot do the task too.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory for table.parquet, runs.json, run.json, attention maps and models.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the lab in the output directory; runs that have ended are kept.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train small models that must attend to nobody except at one token, and say where their heads put their weight.

    Prints for every operation and seed how many steps it took, the largest error, and the weight on BOS where nothing is to
    be said. Not to stop within the cap is a result.
    """
    prepare_libraries()
    from sinklab.trigger.trigger import trigger as run_trigger

    with output.progress() as progress:
        result = run_trigger(
            operation,
            layers=layers,
            heads=heads,
            seeds=seeds,
            length=length,
            width=width,
            position=position,
            target=target,
            triggers=triggers,
            positions=positions,
            bos=bos,
            start=start,
            noise=noise,
            tolerance=tolerance,
            cap=cap,
            anyway=anyway,
            out=out,
            overwrite=overwrite,
            resume=resume,
            progress=progress,
        )
    if as_json:
        output.print_json(result.summary)
    else:
        result.show()
