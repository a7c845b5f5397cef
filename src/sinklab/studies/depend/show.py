"""What ``sinklab depend`` shows: for each task the verdict, a table of policies, and score against distance or context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.results.blocks import Block, Curves, Grid, Heading, Say, interval
from sinklab.results.intervals import Interval, rare_cost
from sinklab.results.naming import counted
from sinklab.results.record import from_json
from sinklab.studies.depend.found import Found, Outcome, PolicyScore

__all__ = ["TITLE", "show"]

TITLE = (
    "Which scores depend on the sink",
    "Every task under caches of one size, with the first tokens and without; intervals are paired by items.",
)
"""Heading of the page, and what was done."""

AXES = {
    "distance": ("found back to", "tokens from the fact to the end of the answer"),
    "context": ("context that helps", "tokens of text before the answer"),
}
"""By the task's axis, the heading of the effective length and the name of the axis."""

CONTEXTS = (
    "context that helps: the longest up to which each one that was tried raised the score over the one before it, by 0.01 or "
    "more on average and with an interval above 0"
)


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """Every task, one below the other, and warnings."""
    found = from_json(Found, summary, "summary.json")
    for outcome in found.tasks:
        yield from _task(outcome)
    for warning in found.warnings:
        yield Say(f"warning: {warning}")
    if len(found.tasks) > 1:
        yield Heading("Index of dependence")
        ordered = sorted(found.tasks, key=lambda task: -task.dependence.mean if isinstance(task.dependence, Interval) else 2.0)
        yield Grid(("task", "share of the score above chance that goes with the sink"), [_index(task) for task in ordered])


def _task(outcome: Outcome) -> Iterator[Block]:
    yield Heading(f"{outcome.task}, {counted(outcome.items, 'item')}")
    yield Say(outcome.sentence)
    yield Say(f"{outcome.reason[:1].upper()}{outcome.reason[1:]}.")
    if outcome.verdict == "no":  # of means, which hide what few items have
        yield Say(rare_cost(outcome.items, "item"), small=True)
    heading, axis = AXES.get(outcome.axis or "", ("", ""))
    headings = ["policy", f"{outcome.metric.replace('_', ' ')}, {outcome.unit}", f"less {outcome.without}"]
    rows = [[row.policy, *_scores(row), *([_length(outcome, row)] if heading else [])] for row in outcome.policies]
    yield Grid([*headings, *([heading] if heading else [])], rows)
    for row in outcome.policies:
        if row.refused:
            yield Say(f"{row.policy} was not run: {row.refused}", small=True)
    _, index = _index(outcome)
    yield Say(f"index of dependence: {index}")
    if outcome.axis == "context":
        yield Say(CONTEXTS, small=True)
    if outcome.axis is not None:
        places = sorted({point.at for curve in outcome.curves.values() for point in curve})
        lines = {
            name: [next((point.mean for point in curve if point.at == place), None) for place in places]
            for name, curve in outcome.curves.items()
        }
        yield Curves(f"{outcome.task} by policy", lines, places, axis, outcome.unit, mark=outcome.window)


def _scores(row: PolicyScore) -> tuple[str, str]:
    if row.score is None:
        return "not run", ""
    return interval(row.score, places=3, sign=""), "" if row.difference is None else interval(row.difference, places=3)


def _index(outcome: Outcome) -> tuple[str, str]:
    """The task and its index with the interval, or why there is none."""
    found = outcome.dependence
    return outcome.task, interval(found, places=3) if isinstance(found, Interval) else found.refused


def _length(outcome: Outcome, row: PolicyScore) -> str:
    """Effective length; of contexts also what the shortest and the longest one of those tried leave open."""
    if row.score is None:
        return ""
    length = row.effective_length
    if length is None:
        return "at chance"
    text, tried = counted(length, "token"), [point.at for point in outcome.curves[row.policy]]
    if outcome.axis == "context" and len(tried) > 1:
        return f"none past {text}" if length == tried[0] else f"{text} or more" if length == tried[-1] else text
    return text
