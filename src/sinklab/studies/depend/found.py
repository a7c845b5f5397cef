"""What depend() finds and shows: for each task the score under every policy, the verdict, and the index of dependence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.results.blocks import Block, Curves, Grid, Heading, Say, counted, interval
from sinklab.results.intervals import Interval, rare_cost
from sinklab.results.metric import FRACTION, Metric, Row
from sinklab.results.sections import from_json

SCORES = {
    "acc": Metric(
        "acc",
        "fraction",
        "The harness's own: 1 where the right answer is the likeliest of those that are given.",
        range=FRACTION,
    ),
    "exact_match": Metric(
        "exact_match", "fraction", "The harness's own: 1 where the text that is generated is the answer.", range=FRACTION
    ),
    "log_likelihood": Metric("log_likelihood", "nats per token", "Mean log-probability of the tokens of the answer."),
}
"""By the harness's name of them, in the order in which they are looked for."""

SINK_DEPENDENCE = Metric(
    "sink_dependence",
    "ratio",
    "(V - H) / (max(V, H) - F) of mean scores with the sink visible (V), hidden (H), and without context (F): chance, or that "
    "of one token in the cache; V and H below F count as F, and there is no index where neither is above F.",
    range=(-1.0, 1.0),
)


@dataclasses.dataclass(frozen=True)
class PolicyScore:
    """A policy on one task: the mean over the items that count, and its paired difference from the window without sinks.

    ``all_documents`` is the mean over all, those that do not fill the cache included; ``refused`` says why it was not run.
    """

    policy: str
    score: Interval | None = None
    difference: Interval | None = None
    all_documents: float | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class NoIndex:
    """Why there is no index."""

    refused: str


@dataclasses.dataclass(frozen=True)
class Point:
    """The score of a policy at one place of the task's axis, in tokens."""

    at: int
    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One task; places on its ``axis`` are distances to the fact or tokens of context before the answer.

    Attributes:
        documents: all that were read.
        items: independent ones among those that count: the cache is full, and both windows hold the fact.
        with_sinks, without: the two policies that are compared; both hold ``window`` tokens. ``difference`` is theirs.
        verdict: yes, no or undecided; ``sentence`` says it of the task, and ``reason`` why.
        dependence: the share of the score above chance that goes with the sink.
    """

    task: str
    metric: str
    unit: str
    axis: str | None
    documents: int
    items: int
    window: int
    with_sinks: str
    without: str
    chance: float | None
    minimal_effect: float
    verdict: str
    sentence: str
    reason: str
    difference: Interval
    dependence: Interval | NoIndex
    policies: list[PolicyScore]
    curves: dict[str, list[Point]]


@dataclasses.dataclass(frozen=True)
class Found:
    """``summary.json`` of ``sinklab depend``; ``bos`` beginning-of-sequence tokens stand in front of every text."""

    model: str
    operation: str
    window: int
    bos: int
    items: int
    level: float
    warnings: list[str]
    tasks: list[Outcome]


def rows(outcome: Outcome, bos: int) -> Iterator[Row]:
    """The score of every policy with its interval and at every context, and the index of dependence."""
    metric = SCORES[outcome.metric]
    for shown in outcome.policies:
        if shown.score is not None:
            yield from _bounds(metric, shown.score, shown.policy, bos, outcome.items)
        for point in outcome.curves.get(shown.policy, ()):
            if outcome.axis == "context":
                yield {
                    "policy": shown.policy, "bos": bos, "metric": metric, "value": point.mean, "count": outcome.items,
                    "query_position": point.at + bos - 1,
                }  # fmt: skip
    if isinstance(outcome.dependence, Interval):
        yield from _bounds(SINK_DEPENDENCE, outcome.dependence, outcome.with_sinks, bos, outcome.items)


def _bounds(metric: Metric, interval: Interval, policy: str, bos: int, items: int) -> Iterator[Row]:
    for one, value in ((metric, interval.mean), (metric.bound("low"), interval.low), (metric.bound("high"), interval.high)):
        yield {"policy": policy, "bos": bos, "metric": one, "value": value, "count": items}


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
