"""The command ``sinklab depend``: which scores of a model depend on the sink tokens that a cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sinklab.arguments import AsJson, Bos, Device, Dtype, ModelSource, Overwrite, Revision, TrustRemoteCode, command
from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["depend"]


@command
def depend(
    model: ModelSource,
    *,
    task: list[str] | None = None,
    policies: str | None = None,
    window: int | None = None,
    sinks: Sequence[int] = (1, 4),
    items: int = 64,
    seed: int = 0,
    bos: Bos = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Path | None = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Say which scores depend on the sink tokens: every task under every cache policy, with intervals.

    Prints a table and a verdict (yes, no, undecided) for each task, and up to where context is of use under each policy.

    The verdict compares two caches of the same size, one with sinks and one without. yes: the score is better with sinks by
    more than the task's minimal effect, whole interval. no: the whole interval lies within the minimal effect. undecided:
    neither, or a score at chance. docs/scores-that-depend-on-the-sink.md has the rules.

    Args:
        task: From 'sinklab list tasks', with settings if need be: needle(corpus=FILE); or lm_eval:TASK. Repeatable; by default
            long_text.
        policies: What to run besides the two that are compared: full, 8+1016 (sinks+window), name(setting=value); by default
            full, every number of sinks, recompute.
        window: Tokens before the query that a cache holds, sinks included; by default half the trained length, ≤ 1024.
        sinks: First tokens that are kept; the verdict is on the largest.
        items: Independent texts, or documents of the harness; more make intervals shorter.
        seed: Seed of the texts; the same seed gives the same tokens.
        out: Directory for table.parquet, summary.json, run.json and a plot for each task.

    Examples:
        sinklab depend embedded:softmax --task long_text
        sinklab depend embedded:softmax --task needle,line_lookup --window 120 --out build/depend
        sinklab depend ORG/MODEL --task 'long_text(corpus=book.txt)' --policies '8+1016, strided' --json
        sinklab depend ORG/MODEL --task lm_eval:arc_easy --window 64 --items 200  (needs sinklab[evaluation])
    """
    quiet_libraries()
    from sinklab.evaluation import depend as run
    from sinklab.registry import split_specs

    with output.progress() as progress:
        result = run(
            model,
            [part for given in task or ["long_text"] for part in split_specs(given)],
            policies=None if policies is None else split_specs(policies),
            window=window,
            sinks=sinks,
            items=items,
            seed=seed,
            bos=bos,
            device=device,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            out=out,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        output.print_json(result.summary)
        return
    for number, outcome in enumerate(result.summary["tasks"]):
        _print(outcome, first=number == 0)
    if out is not None:
        print(f"\ntable  {out / 'table.parquet'}")


def _print(outcome: Mapping[str, Any], first: bool) -> None:
    console = Console(soft_wrap=True, highlight=False, width=None if Console().is_terminal else output.PIPE_WIDTH)
    unit = {"log_likelihood": "nats per token", "choice": "share of digits right"}.get(outcome["metric"], outcome["metric"])
    shown = Table(box=None, pad_edge=False)
    for name in ("policy", unit, "interval", f"less {outcome['without']}", "interval", AXES.get(outcome["axis"], "")):
        shown.add_column(name, justify="left" if name == "policy" else "right")
    for row in outcome["policies"]:
        if "refused" in row:
            shown.add_row(row["policy"], "not run")
            continue
        shown.add_row(row["policy"], *_cells(row["score"], ""), *_cells(row["difference"], "+"), _length(outcome, row))
    console.print(f"{'' if first else chr(10)}[bold]{outcome['task']}[/bold], {outcome['items']} items")
    console.print(shown)
    for row in outcome["policies"]:
        if "refused" in row:
            console.print(f"{row['policy']} was not run: {row['refused']}", markup=False)
    console.print(outcome["sentence"], markup=False, style="bold")


AXES = {"distance": "found back to", "context": "context of use", "position": "answered up to"}
"""Heading of the effective length, by the task's axis."""


def _cells(interval: Mapping[str, float] | None, sign: str) -> tuple[str, str]:
    if interval is None:
        return "", ""
    return f"{interval['mean']:{sign}.3f}", f"{interval['low']:{sign}.3f} … {interval['high']:{sign}.3f}"


def _length(outcome: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if outcome["axis"] is None:
        return ""
    return "at chance" if row["effective_length"] is None else f"{row['effective_length']} tokens"
