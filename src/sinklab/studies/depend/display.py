"""What the terminal shows of ``sinklab depend``: a table and a verdict for each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.naming import counted
from sinklab.results.run import Result
from sinklab.studies.depend.judge import MINIMAL_GAIN
from sinklab.studies.depend.words import bos_name, index_text, score_text

__all__ = ["display"]

AXES = {"distance": "found back to", "context": "context that helps", "position": "answered up to"}
"""Heading of the effective length, by the task's axis."""


def display(result: Result) -> Iterator[RenderableType]:
    """Every task, one below the other."""
    for number, outcome in enumerate(result.summary["tasks"]):
        yield from _task(outcome, first=number == 0)
    for warning in result.summary["warnings"]:
        yield Text(f"\nwarning: {warning}", style="bold")
    if len(result.summary["tasks"]) > 1:
        yield "\n[bold]index of dependence[/bold]: share of the score above chance that goes with the sink"
        overview = Table(box=None, pad_edge=False, show_header=False)
        for outcome in sorted(result.summary["tasks"], key=lambda task: -task["dependence"].get("mean", -2.0)):
            overview.add_row(outcome["task"], index_text(outcome["dependence"]))
        yield overview
    if result.folder is not None:
        yield Text(f"\ntable  {result.folder / 'table.parquet'}")


def _task(outcome: Mapping[str, Any], first: bool) -> Iterator[RenderableType]:
    unit = {"log_likelihood": "nats per token", "choice": "share of answers right"}.get(outcome["metric"], outcome["metric"])
    shown = Table(box=None, pad_edge=False)
    for name in ("policy", unit, "interval", f"less {outcome['without']}", "interval", AXES.get(outcome["axis"], "")):
        shown.add_column(name, justify="left" if name == "policy" else "right")
    for row in outcome["policies"]:
        if "refused" in row:
            shown.add_row(row["policy"], "not run")
            continue
        shown.add_row(row["policy"], *_cells(row["score"], ""), *_cells(row["difference"], "+"), _length(outcome, row))
    yield f"{'' if first else chr(10)}[bold]{escape(outcome['task'])}[/bold], {counted(outcome['items'], 'item')}"
    yield shown
    for row in outcome["policies"]:
        if "refused" in row:
            yield Text(f"{row['policy']} was not run: {row['refused']}")
    if outcome["axis"] == "context":
        yield Text(_context_note(outcome))
    yield Text(outcome["sentence"], style="bold")
    yield Text(outcome["dependence_sentence"], style="bold")
    if outcome["grid"]:
        yield from _grid(outcome)


def _grid(outcome: Mapping[str, Any]) -> Iterator[RenderableType]:
    """A line for every pair of cells; why a cell is not there stands below, once."""
    shown = Table(box=None, pad_edge=False)
    for name in ("in front", "policy", "bits", "sink visible", "hidden", "difference", "interval", "index of dependence"):
        shown.add_column(name, justify="left" if name in ("in front", "policy") else "right")
    reasons: dict[str, None] = {}
    for pair in outcome["grid"]:
        sides = [pair["visible"], pair["hidden"]]
        reasons |= dict.fromkeys(side["refused"] for side in sides if side is not None and "refused" in side)
        shown.add_row(
            bos_name(pair["bos"]),
            pair["policy"],
            str(pair["bits"]),
            *map(score_text, sides),
            *_cells(pair["difference"], "+"),
            index_text(pair["dependence"]),
        )
    yield shown
    for reason in reasons:
        yield Text(f"–: {reason}")


def _cells(interval: Mapping[str, float] | None, sign: str) -> tuple[str, str]:
    if interval is None:
        return "", ""
    return f"{interval['mean']:{sign}z.3f}", f"{interval['low']:{sign}z.3f} … {interval['high']:{sign}z.3f}"


def _length(outcome: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Effective length of a policy; of contexts also what the shortest and the longest one of those tried leave open."""
    if outcome["axis"] is None:
        return ""
    length = row["effective_length"]
    if length is None:
        return "at chance"
    text, contexts = counted(length, "token"), _contexts(outcome)
    if outcome["axis"] == "context" and len(contexts) > 1:
        return f"none past {text}" if length == contexts[0] else f"{text} or more" if length == contexts[-1] else text
    return text


def _context_note(outcome: Mapping[str, Any]) -> str:
    """What stands in the column of contexts."""
    tried = ", ".join(f"{context:,}" for context in _contexts(outcome))
    return (
        f"context that helps: scored after {tried} tokens of text; the longest of these up to which each raised the score over "
        f"the one before it, by {MINIMAL_GAIN:g} {outcome['unit']} or more on average and with an interval above 0"
    )


def _contexts(outcome: Mapping[str, Any]) -> list[int]:
    """Tokens of text before those that were scored, ascending; the same under every policy."""
    curve: list[dict[str, Any]] = next(iter(outcome["curves"].values()), [])
    return [point["at"] for point in curve]
