"""What ``sinklab depend`` shows: for each task the verdict, a table of policies, and score against distance or context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.results.blocks import Block, Curves, Grid, Heading, Say, counted, interval
from sinklab.results.intervals import Interval, rare_cost
from sinklab.results.sections import from_json
from sinklab.studies.depend.found import Found, Outcome, PolicyScore

TITLE = (
    "Which scores depend on the sink",
    "Every task under caches of one size, with the first tokens and without; intervals are paired by items.",
)
"""Heading of the page, and what was done."""

AXES = {"distance": "tokens from the fact to the end of the answer", "context": "tokens of text before the answer"}
"""What stands along the axis of a task."""


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
    headings = ["policy", f"{outcome.metric.replace('_', ' ')}, {outcome.unit}", f"less {outcome.without}"]
    yield Grid(headings, [[row.policy, *_scores(row)] for row in outcome.policies])
    for row in outcome.policies:
        if row.refused:
            yield Say(f"{row.policy} was not run: {row.refused}", small=True)
    _, index = _index(outcome)
    yield Say(f"index of dependence: {index}")
    if outcome.axis is not None:
        places = sorted({point.at for curve in outcome.curves.values() for point in curve})
        lines = {
            name: [next((point.mean for point in curve if point.at == place), None) for place in places]
            for name, curve in outcome.curves.items()
        }
        yield Curves(f"{outcome.task} by policy", lines, places, AXES[outcome.axis], outcome.unit, mark=outcome.window)


def _scores(row: PolicyScore) -> tuple[str, str]:
    if row.score is None:
        return "not run", ""
    return interval(row.score, places=3, sign=""), "" if row.difference is None else interval(row.difference, places=3)


def _index(outcome: Outcome) -> tuple[str, str]:
    """The task and its index with the interval, or why there is none."""
    found = outcome.dependence
    return outcome.task, interval(found, places=3) if isinstance(found, Interval) else found.refused
