"""What is shown of a comparison of pathways: a table of what decides, and one of every number by what it is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.results.blocks import Block, Facts, Grid, Heading, Say
from sinklab_claims.pathways.columns import COLUMNS, DECIDING, ON_NATURAL_TEXT, TABLES, Column
from sinklab_claims.pathways.operations import REFERENCE

__all__ = ["DEFINITION", "show", "show_numbers"]

DEFINITION: Mapping[str, str] = {
    "loss": "held-out loss less than 0.02 nats above softmax's at the same seed",
    "sink": "fewer than 5 % of heads sink on the first token, by weight times gate and by the share of a row",
    "activations": "the first hidden state is less than 2 times as long as others",
    "window": "a window of a quarter of the context without sinks costs less than 0.02 nats; of natural text: the first four "
    "tokens give back less than 0.02 nats of what it costs",
    "int8": "8-bit weights and activations cost less than 0.02 nats",
}
"""The bounds of low distortion (:mod:`sinklab_claims.pathways.judging`), all of which must hold, in words."""

RULE = (
    "A bound holds if the 95 % interval over seeds lies inside, and fails if it lies outside. Losses are equivalent if the 90 "
    "% interval lies within 0.02 nats of 0."
)


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The answers, and the numbers on which they rest."""
    rows = summary["rows"]
    inside = [row["label"] for row in rows if row["low_distortion"] == "yes" and row["label"] != REFERENCE]
    yield Say(f"Low-distortion: {', '.join(inside) or 'none'}, of {len(rows) - 1} operations beside softmax.")
    answers = {
        "low-distortion": [_answer(row) for row in rows],
        "replaces the sink at one rate": [_replaces(row) if _has_sink(rows) else "–" for row in rows],
        "loss beside softmax (nats)": [_beside(row) for row in rows],
    }
    answers = {heading: cells for heading, cells in answers.items() if any(cell != "–" for cell in cells)}
    natural = any("scale_rate_worth" in row["numbers"] for row in rows)
    deciding = {ON_NATURAL_TEXT.get(name, name) if natural else name for name in DECIDING}
    yield from _table(rows, answers, [column for column in COLUMNS if column.name in deciding])
    yield Facts(list(DEFINITION.items()))
    yield Say(RULE, small=True)
    if summary["cannot"]:
        yield Facts([(f"{label}, trigger task", f"cannot do it: {why}") for label, why in summary["cannot"].items()])


def show_numbers(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The same, and every number: one table for what it is about."""
    yield from show(summary)
    for about, heading in TABLES.items():
        columns = [column for column in COLUMNS if column.about == about]
        if any(column.name in row["numbers"] for column in columns for row in summary["rows"]):
            yield Heading(heading, level=3)
            yield from _table(summary["rows"], {}, columns)


def _table(rows: list[Any], answers: Mapping[str, list[str]], columns: list[Column]) -> Iterator[Block]:
    """One row an operation; columns that nothing was measured for are left out."""
    columns = [column for column in columns if any(column.name in row["numbers"] for row in rows)]
    headings = ["operation", *answers, *(f"{column.heading} ({column.metric.unit})" for column in columns)]
    cells = [
        [row["label"], *(answer[index] for answer in answers.values()), *(_cell(row, column) for column in columns)]
        for index, row in enumerate(rows)
    ]
    yield Grid(headings, cells, text=1 + len(answers))


def _cell(row: Mapping[str, Any], column: Column) -> str:
    """A number with its interval; a rate that is the end of those that were tried says so."""
    number = row["numbers"].get(column.name)
    if number is None:
        return "–"
    text = column.written(number["mean"])
    if number["low"] is not None and number["low"] != number["high"]:
        text += f" [{column.written(number['low'])}, {column.written(number['high'])}]"
    end = row["rate"]["end_of_range"] if column.name == "chosen_factor" and row["rate"] else ""
    return f"{text} ({end} tried)" if end else text


def _answer(row: Mapping[str, Any]) -> str:
    if row["label"] == REFERENCE:
        return "reference"
    verdict = {"no": "not reproduced", "undecided": "inconclusive"}.get(row["low_distortion"])
    why = [name for name, bound in row["bounds"].items() if bound["verdict"] == verdict]
    return f"{row['low_distortion']}: {', '.join(why)}" if why else str(row["low_distortion"])


def _has_sink(rows: list[Any]) -> bool:
    """Whether softmax has a sink at the one rate for all, by both of what tells one: heads that sink, and a window's loss."""
    bounds = next(row["bounds_at_one_rate"] for row in rows if row["label"] == REFERENCE)
    return bool(bounds) and all(bounds[name]["verdict"] == "not reproduced" for name in ("sink", "window"))


def _replaces(row: Mapping[str, Any]) -> str:
    of = row["replacement"]
    return "–" if of is None else f"{of['answer']}: {', '.join(of['bounds'])}" if of["bounds"] else str(of["answer"])


def _beside(row: Mapping[str, Any]) -> str:
    """How the loss compares with that of softmax, with the mean difference and its 90 % interval."""
    beside = row["beside_softmax"]
    if beside is None:
        return "–"
    if beside["interval"] is None:
        return str(beside["answer"])
    return f"{beside['answer']}: {beside['mean']:+z.3f} [{beside['interval'][0]:+z.3f}, {beside['interval'][1]:+z.3f}]"
