"""What the commands print: plain text when piped, colour and progress on a terminal; results on stdout, the rest on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from sinklab.cli.describe import Description
from sinklab.results.run import Result

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "print_catalogue",
    "print_comparison",
    "print_description",
    "print_json",
    "print_measurement",
    "print_policies",
    "print_result",
    "print_summary",
    "progress",
]

LISTED = 5
"""Sink positions that the terminal shows; summary.json has more, the table all."""

PIPE_WIDTH = 200
"""Columns of output that is not going to a terminal; long lines are for the reader's tools to wrap."""


def _out() -> Console:
    # Made for each call, so that it writes to the stdout of the moment (tests and pagers replace it).
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callback ``(stage, done, total)`` that draws bars on a terminal's stderr and nothing anywhere else."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


def print_result(result: Any, as_json: bool = False) -> int:
    """Show what a command returned; the exit status: 1 if it says that parts of it failed, which follow on stderr."""
    if isinstance(result, Result):
        if as_json:
            sys.stdout.write(result.to_json())
        else:
            result.show()
        errors = result.summary.get("errors") or []
        for error in errors:
            sys.stderr.write(f"failed: {error}\n")
        return 1 if errors else 0
    if result is not None:
        sys.stdout.write(f"{result}\n")
    return 0


def print_json(record: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_summary(summary: Mapping[str, Any], report: str) -> None:
    """The few numbers of an audit that answer the question, and where the page is."""
    loss = summary["loss"]
    lines = {
        "model": f"{summary['model']} ({summary['operation']} attention, {summary['num_heads']} heads)",
        "text": f"{summary['corpus']} {_bos(summary)}, {summary['samples']} samples of {summary['seq_len']} tokens",
        "loss": "not defined for this model" if loss is None else f"{loss:.3f} nats per token",
        "sink rate": f"{summary['sink_rate_gu2024']:.2f} % at position 0 (Gu et al. 2024, threshold {summary['threshold']:g})",
        "sinks": _sinks(summary),
        "elsewhere": "; ".join(
            f"{condition['corpus']} {_bos(condition)} {condition['sink_rate_gu2024']:.2f} %"
            for condition in summary["conditions"][1:]
        ),
        "cache": (summary.get("cache") or {}).get("recommendation", ""),
        "forced": _forced(summary.get("certificate")),
        "causes": _causes(summary.get("causes")),
        "report": report,
    }
    out = _out()
    for name, text in lines.items():
        if text:
            out.print(f"[bold]{name:<10}[/bold]{escape(text)}")


def _forced(certificate: Mapping[str, Any] | None) -> str:
    """What the no-op certificate says, or why there is none though it was asked for."""
    if certificate is None:
        return ""
    return str(certificate["text"]) if "heads" in certificate else f"not certified: {certificate['refused']}"


def _causes(causes: Mapping[str, Any] | None) -> str:
    """What the heads do with the sink, or why it is not known though it was asked for."""
    if causes is None:
        return ""
    return str(causes["text"]) if "heads" in causes else f"not examined: {causes['refused']}"


def _bos(condition: Mapping[str, Any]) -> str:
    return "with BOS" if condition["bos"] else "without BOS"


def _sinks(summary: Mapping[str, Any]) -> str:
    """Where the sinks are: positions, or the learned logit that takes their place."""
    listed = ", ".join(_sink(sink) for sink in summary["sink_positions"][:LISTED])
    if summary.get("sink_role") == "null score":
        return f"null score, {100 * summary['null_mass']:.1f} % of the mass" + (f"; {listed}" if listed else "")
    if summary.get("sink_role") == "none" and listed:
        return f"none by weight (after dividing each row by its sum: {listed})"
    return listed or "none"


def _sink(sink: Mapping[str, Any]) -> str:
    return f"position {sink['position']} {json.dumps(sink['token'], ensure_ascii=False)} {sink['rate']:.2f} %"


def print_measurement(table: pd.DataFrame) -> None:
    """Every metric over the layers and heads that give it; of a metric by position, the first position is shown."""
    shown = Table(box=None, pad_edge=False)
    for column in ("probe", "metric", "of", "values", "mean", "min", "max", "unit"):
        shown.add_column(column, justify="right" if column in ("values", "mean", "min", "max") else "left")
    for (probe, metric, unit), rows in table.groupby(["probe", "metric", "unit"], sort=True):
        at_first = [name for name in ("key_position", "query_position") if rows[name].notna().any()]
        for name in at_first:
            rows = rows[rows[name] == 0]
        # Rows without a layer are the same numbers pooled over the model; where there is nothing else they are shown.
        rows = rows[rows["layer"].notna()] if rows["layer"].notna().any() else rows
        values = rows["value"].astype("float64")
        numbers = (f"{number:.4g}" for number in (values.mean(), values.min(), values.max()))
        place = "position 0" if at_first else "all positions"
        shown.add_row(str(probe), str(metric), place, str(len(rows)), *numbers, str(unit))
    _out().print(shown)


def print_policies(summary: Mapping[str, Any]) -> None:
    """One row a cache policy, what was left out and why, and what to use."""
    from sinklab.report.policies import HEADINGS, left_out_lines, policy_rows

    shown = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for row in policy_rows(summary):
        shown.add_row(*row)
    out = _out()
    texts = f"{summary['documents']} texts of {summary['tokens']} tokens of {summary['corpus']} {_bos(summary)}"
    out.print(f"{summary['model']}: {texts}, scored from token {summary['scored_from']} on\n", markup=False)
    out.print(shown)
    for line in left_out_lines(summary):
        out.print(f"left out  {line}", markup=False)
    out.print(f"\n{summary['recommendation']}", markup=False)


def print_comparison(table: pd.DataFrame, verdicts: Sequence[str]) -> None:
    """One row a number, one column an audit; then what each audit found, in a sentence."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for name in table.columns:
        shown.add_column(escape(str(name)))
    for row, values in zip(table.index, table.itertuples(index=False), strict=True):
        shown.add_row(escape(str(row)), *(escape(str(value)) for value in values))
    out = _out()
    out.print(shown)
    for verdict in verdicts:
        out.print(f"\n{verdict}", markup=False)


def print_catalogue(listed: Mapping[str, Mapping[str, str]]) -> None:
    """Names and first sentences, by kind."""
    out = _out()
    width = 2 + max((len(name) for names in listed.values() for name in names), default=0)
    for number, (kind, names) in enumerate(listed.items()):
        out.print(f"{chr(10) if number else ''}[bold]{kind}[/bold]")
        for name, summary in names.items():
            out.print(f"  {name:<{width}}{summary}", markup=False)


def print_description(description: Description) -> None:
    """Docstring, parameters, definitions and papers of a plug-in."""
    out = _out()
    version = "" if description.version is None else f", version {description.version}"
    out.print(f"[bold]{description.name}[/bold] ({description.kind}{version})")
    out.print(description.summary, markup=False)
    if description.text:
        out.print(f"\n{description.text}", markup=False)
    if description.parameters:
        recipe = description.kind == "recipe"
        out.print(f"\n[bold]{'fields, for --set' if recipe else 'parameters'}[/bold]")
        for parameter in description.parameters:
            default = "" if parameter.default is None else f" = {parameter.default}"
            out.print(
                f"  {parameter.name}{default}" if recipe else f"  {parameter.name}: {parameter.type}{default}", markup=False
            )
            if parameter.text:
                out.print(f"      {parameter.text}", markup=False, style="dim")
    if description.metrics:
        out.print("\n[bold]definitions[/bold]")
        for metric in description.metrics:
            out.print(f"  [bold]{metric.name}[/bold] {escape(f'[{metric.unit}]')} version {metric.version}")
            out.print(f"    {metric.definition}{f'  {metric.paper}' if metric.paper else ''}", markup=False)
    if description.papers:
        out.print("\n[bold]papers[/bold]")
        for paper in description.papers:
            out.print(f"  https://arxiv.org/abs/{paper}", markup=False)
    out.print("\n[bold]file[/bold]")
    out.print(f"  {description.file}", markup=False)
