"""The command ``sinklab backcopy``: heads that copy at a trigger and sleep elsewhere, and what their sleep does to BOS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.cli import output
from sinklab.cli.libraries import prepare_libraries
from sinklab.cli.options import CorpusOption, Json, whole_numbers
from sinklab.registry import operations, split_specs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EPILOG", "backcopy"]

EPILOG = (
    "The task is that of Guo et al. 2024 (arXiv 2410.13835), smaller by default; docs/backcopy.md explains the columns.\n\n"
    "Examples:\n\n"
    "sinklab backcopy --seeds 0  (a minute a run on a core)\n\n"
    "sinklab backcopy --layers 3 --optimizer adamw,sgd --out build/backcopy\n\n"
    "sinklab backcopy --operation 'softmax,sink_logit,gated' --json\n\n"
    "sinklab backcopy --scale paper --layers 3 --no-attention 2 --out build/paper  (days on a CPU)"
)


def backcopy(
    operation: Annotated[
        str,
        typer.Option(metavar="NAME[,NAME…]", help="From 'sinklab list operations', with settings if need be: relu:power=0."),
    ] = "softmax,relu",
    optimizer: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="adamw, sgd, or both.")] = "adamw",
    layers: Annotated[str, typer.Option(metavar="N[,N…]", help="Layers of a model; several depths are several models.")] = "1",
    heads: Annotated[int, typer.Option(help="Heads a layer.")] = 1,
    seeds: Annotated[
        str, typer.Option(metavar="0..2", help="Of initial weights and data; both ends included, or a list.")
    ] = "0..2",
    steps: Annotated[int | None, typer.Option(help="Updates.", show_default="4,000 small, 10,000 paper")] = None,
    scale: Annotated[
        Literal["small", "paper"], typer.Option(help="Sizes: 64 tokens and width 64, or the paper's 256 and 256.")
    ] = "small",
    learning_rate: Annotated[
        float | None, typer.Option(help="The same for all runs.", show_default="by scale, optimizer and operation")
    ] = None,
    triggers: Annotated[int, typer.Option(help="So many of the most frequent characters are triggers.")] = 3,
    no_attention: Annotated[
        str | None, typer.Option(metavar="N[,N…]", help="Layers without attention, counted from 0.")
    ] = None,
    no_feed_forward: Annotated[
        str | None, typer.Option(metavar="N[,N…]", help="Layers without feed-forward, counted from 0.")
    ] = None,
    corpus: CorpusOption = "python_source",
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for table.parquet, runs.json, run.json and curves.png; finished runs in it are kept."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train the runs in the directory again.")] = False,
    as_json: Json = False,
) -> None:
    """Train small models to copy behind triggers and predict bigrams elsewhere, and say what their heads do.

    Prints for every run the loss above the floor, the three extreme-token read-outs (weight on BOS, norm of its value, norm of
    its residual), whether the copying head is active at triggers and dormant elsewhere, and what the model is without it.
    """
    prepare_libraries()
    from sinklab.arguments import parse_seeds
    from sinklab.backcopy.lab import run_lab
    from sinklab.backcopy.training import SCALES, Setting

    chosen = [operations.make(name) for name in split_specs(operation)]
    setting = Setting(
        heads=heads,
        triggers=triggers,
        learning_rate=learning_rate,
        no_attention=tuple(whole_numbers("--no-attention", no_attention)) if no_attention is not None else (),
        no_feed_forward=tuple(whole_numbers("--no-feed-forward", no_feed_forward)) if no_feed_forward is not None else (),
        **{**SCALES[scale], **({} if steps is None else {"steps": steps})},
    )
    with output.progress() as progress:
        result = run_lab(
            chosen,
            parse_seeds(seeds),
            setting,
            optimizers=split_specs(optimizer),
            layers=whole_numbers("--layers", layers),
            corpus=corpus,
            out=out,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        output.print_json({"runs": result.runs})
        return
    _print(result.runs, scale)
    if result.resumed:
        typer.echo(f"\n{result.resumed} of {len(result.runs)} runs were there already; --overwrite trains them again")
    if out is not None:
        typer.echo(f"\ntable  {out / 'table.parquet'}\nfigure {out / 'curves.png'}")


HEADINGS = (
    "operation",
    "optimizer",
    "layers",
    "seed",
    "excess at triggers",
    "elsewhere",
    "copy head",
    "on BOS",
    "at triggers",
    "on previous at triggers",
    "active, dormant",
    "value ratio",
    "residual peak",
    "without head: at triggers",
    "elsewhere",
)


def _print(runs: list[dict[str, Any]], scale: str) -> None:
    console = Console(soft_wrap=True, highlight=False, width=None if Console().is_terminal else output.PIPE_WIDTH)
    shown = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading in ("operation", "optimizer") else "right")
    for run in runs:
        names = ("bos_weight", "bos_weight_trigger", "previous_weight_trigger")
        without = ("knock_out_trigger_excess", "knock_out_other_excess")
        shown.add_row(
            escape(run["operation"]),
            run["optimizer"],
            str(run["layers"]),
            str(run["seed"]) + (", diverged" if run["outcome"] == "diverged" else ""),
            _number(run["trigger_excess"]),
            _number(run["other_excess"]),
            "{}.{}".format(*run["copy_head"]),
            *(_number(run[name]) for name in names),
            _states(run),
            _number(run["value_ratio"], 2),
            _number(run["residual_peak"], 2),
            *(_number(run[name]) for name in without),
        )
    console.print(shown)
    console.print(f"\nscale {scale}; losses in nats a token; ratios are BOS to the mean of the others", markup=False)


def _states(run: Mapping[str, Any]) -> str:
    words = {True: "yes", False: "no", None: "–"}
    return f"{words[run['active']]}, {words[run['dormant']]}"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
