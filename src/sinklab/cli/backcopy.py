"""The command ``sinklab backcopy``: heads that copy at a trigger and sleep elsewhere, and what their sleep does to BOS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.arguments import AsJson, command
from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries
from sinklab.registry import operations, split_specs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["backcopy"]


@command
def backcopy(
    *,
    operation: str = "softmax,relu",
    optimizer: str = "adamw",
    layers: Sequence[int] = (1,),
    heads: int = 1,
    seeds: str = "0..2",
    steps: int | None = None,
    scale: Literal["small", "paper"] = "small",
    learning_rate: float | None = None,
    triggers: int = 3,
    no_attention: Sequence[int] = (),
    no_feed_forward: Sequence[int] = (),
    corpus: str = "python_source",
    out: Path | None = None,
    overwrite: bool = False,
    as_json: AsJson = False,
) -> None:
    """Train small models to copy behind triggers and predict bigrams elsewhere, and say what their heads do.

    Prints for every run the loss above the floor, the three extreme-token read-outs (weight on BOS, norm of its value, norm of
    its residual), whether the copying head is active at triggers and dormant elsewhere, and what the model is without it.

    The task is that of Guo et al. 2024 (arXiv 2410.13835), smaller by default; docs/backcopy.md explains the columns.

    Args:
        corpus: A name from 'sinklab list corpora', with settings if need be, or a UTF-8 text file.
        operation: From 'sinklab list operations', with settings if need be: relu:power=0.
        optimizer: adamw, sgd, or both.
        layers: Layers of a model; several depths are several models.
        heads: Heads a layer.
        seeds: Of initial weights and data; both ends included, or a list.
        steps: Updates; by default 4,000 small, 10,000 paper.
        scale: Sizes: 64 tokens and width 64, or the paper's 256 and 256.
        learning_rate: The same for all runs; by default by scale, optimizer and operation.
        triggers: So many of the most frequent characters are triggers.
        no_attention: Layers without attention, counted from 0.
        no_feed_forward: Layers without feed-forward, counted from 0.
        out: Directory for table.parquet, runs.json, run.json and curves.png; finished runs in it are kept.
        overwrite: Train the runs in the directory again.

    Examples:
        sinklab backcopy --seeds 0  (a minute a run on a core)
        sinklab backcopy --layers 3 --optimizer adamw,sgd --out build/backcopy
        sinklab backcopy --operation 'softmax,sink_logit,gated' --json
        sinklab backcopy --scale paper --layers 3 --no-attention 2 --out build/paper  (days on a CPU)
    """
    quiet_libraries()
    from sinklab.arguments import parse_seeds
    from sinklab.backcopy.lab import run_lab
    from sinklab.backcopy.training import SCALES, Setting

    chosen = [operations.make(name) for name in split_specs(operation)]
    setting = Setting(
        heads=heads,
        triggers=triggers,
        learning_rate=learning_rate,
        no_attention=tuple(no_attention),
        no_feed_forward=tuple(no_feed_forward),
        **{**SCALES[scale], **({} if steps is None else {"steps": steps})},
    )
    with output.progress() as progress:
        result = run_lab(
            chosen,
            parse_seeds(seeds),
            setting,
            optimizers=split_specs(optimizer),
            layers=layers,
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
        print(f"\n{result.resumed} of {len(result.runs)} runs were there already; --overwrite trains them again")
    if out is not None:
        print(f"\ntable  {out / 'table.parquet'}\nfigure {out / 'curves.png'}")


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
