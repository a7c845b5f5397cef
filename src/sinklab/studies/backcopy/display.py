"""What the terminal shows of ``sinklab backcopy``: a row a run."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.run import Result

__all__ = ["display"]

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


def display(result: Result) -> Iterator[RenderableType]:
    """Losses, the numbers of the copy head, and what the model is without it."""
    shown = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading in ("operation", "optimizer") else "right")
    runs, words = result.summary["runs"], {True: "yes", False: "no", None: "–"}
    for run in runs:
        shown.add_row(
            escape(run["operation"]),
            run["optimizer"],
            str(run["layers"]),
            str(run["seed"]) + (", diverged" if run["outcome"] == "diverged" else ""),
            _number(run["trigger_excess"]),
            _number(run["other_excess"]),
            "{}.{}".format(*run["copy_head"]),
            *(_number(run[name]) for name in ("bos_weight", "bos_weight_trigger", "previous_weight_trigger")),
            f"{words[run['active']]}, {words[run['dormant']]}",
            _number(run["value_ratio"], 2),
            _number(run["residual_peak"], 2),
            *(_number(run[name]) for name in ("knock_out_trigger_excess", "knock_out_other_excess")),
        )
    yield shown
    scale = result.record["config"]["scale"]
    yield Text(f"\n{f'scale {scale}; ' if scale else ''}losses in nats a token; ratios are BOS to the mean of the others")
    resumed = result.record["resumed"]
    if resumed:
        yield Text(f"\n{resumed} of {len(runs)} runs were there already; --overwrite trains them again")
    if result.folder is not None:
        yield Text(f"\ntable  {result.folder / 'table.parquet'}\nfigure {result.folder / 'curves.png'}")


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
