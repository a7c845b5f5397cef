"""The command ``sinklab retrieval``: heads that must look something up at one token, and be silent at all others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
    from sinklab.trigger.retrieval import retrieval as run_retrieval

    with output.progress() as progress:
        result = run_retrieval(
            operation,
            target=target,
            seeds=seeds,
            length=length,
            keys=keys,
            values=values,
            position=position,
            cap=cap,
            out=out,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        output.print_json(result.summary)
    else:
        result.show()
