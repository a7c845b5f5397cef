"""The comparison in words: a paragraph that follows from the numbers by rules, and the one table as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sinklab.studies.pathways.columns import COLUMNS, Column
from sinklab.studies.pathways.judging import BOUNDS, Row, Summary
from sinklab.studies.pathways.operations import REFERENCE
from sinklab.studies.reproduce.scales import DESCRIPTIONS

__all__ = ["DEFINITION", "cell", "figure_title", "markdown", "paragraph"]

DEFINITION = (
    "A pathway is low-distortion if, in a model trained with it on the same data for the same number of steps, the held-out "
    "loss is less than 0.02 nats above that of softmax with the same seed; fewer than 5 % of heads sink on the first token; "
    "the first hidden state is less than 2 times as long as others; a window of a quarter of the context without sinks costs "
    "less than 0.02 nats; and 8-bit weights and activations cost less than 0.02 nats. Each holds if its 95 % interval over "
    "seeds lies inside the bound, fails if it lies outside, and is undecided otherwise."
)
"""The definition of :mod:`sinklab.studies.pathways.judging`, in a paragraph."""

LOST = 0.02
"""Nats of loss at the larger learning rate below which an operation is said to bear it."""


def cell(summary: Summary | None, column: Column) -> str:
    """A number with half the width of its interval; a median of times with its quartiles; a dash where there is none."""
    if summary is None:
        return "–"
    text = format(summary.mean, column.form)
    if column.source == "cost":
        same = summary.low == summary.high
        return text if same else f"{text} ({format(summary.low, column.form)}–{format(summary.high, column.form)})"
    if summary.low is None or summary.high is None:
        return f"{text} (n = {summary.count})"
    half = (summary.high - summary.low) / 2
    return f"{text} ± {format(half, column.form)}" if half else text


def figure_title(scale: str, seeds: int) -> str:
    """What stands above the figure."""
    return f"Ways to do nothing, scale {scale}, {seeds} seeds, 95 % intervals"


def markdown(rows: Sequence[Row]) -> str:
    """One row an operation, one column a number; columns that nothing was measured for are left out."""
    columns = [column for column in COLUMNS if any(column.name in row.numbers for row in rows)]
    headings = ["operation", "low-distortion", *(f"{column.heading} ({column.metric.unit})" for column in columns)]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|" + "---:|" * len(columns)]
    for row in rows:
        cells = [cell(row.numbers.get(column.name), column) for column in columns]
        lines.append("| " + " | ".join([f"`{row.label}`", _answer(row), *cells]) + " |")
    return "\n".join(lines) + "\n"


def paragraph(rows: Sequence[Row], cannot: Mapping[str, str], *, scale: str, seeds: int) -> str:
    """Which pathway is low-distortion, as far as the numbers say; every sentence is there only if they do.

    Args:
        rows: of :func:`~sinklab.studies.pathways.judging.judged`, the reference among them.
        cannot: operations that provably cannot do the trigger task.
    """
    others = [row for row in rows if row.label != REFERENCE]
    sentences = [f"At the scale {scale} ({DESCRIPTIONS[scale]}), over {seeds} seed{'s' if seeds != 1 else ''}:"]  # type: ignore[index]
    sentences += _of_reference(next(row for row in rows if row.label == REFERENCE))
    good = [row.label for row in others if row.answer == "yes"]
    if good:
        sentences.append(f"Low-distortion {'is' if len(good) == 1 else 'are'} {_list(good)}.")
    elif any(row.answer == "undecided" for row in others):
        sentences.append("No pathway is shown to be low-distortion.")
    else:
        sentences.append("No pathway is low-distortion.")
    failing = [f"{row.label} ({', '.join(row.named('not reproduced'))})" for row in others if row.answer == "no"]
    if failing:
        sentences.append(f"Not low-distortion, with what fails in brackets: {_list(failing)}.")
    open_ones = [f"{row.label} ({', '.join(row.named('inconclusive'))})" for row in others if row.answer == "undecided"]
    if open_ones:
        sentences.append(f"Undecided, with what is open in brackets: {_list(open_ones)}.")
    best = [row.label for row in rows if row.best]
    if best:
        sentences.append(
            f"By the means, no other operation has both a lower loss and a lower distortion than {_list(best)}; with so few "
            "seeds neighbours on the plot may change places."
        )
    sentences += _of_trigger(rows, cannot) + _of_rate(rows) + _of_cost(others)
    sentences.append(_limits(scale))
    return " ".join(sentences)


def _of_reference(row: Row) -> list[str]:
    wanted = ("held_out_loss", "sink_rate", "window_gap", "int8_gap")
    if not all(name in row.numbers for name in wanted):
        return [f"{row.label} could not be measured in full, so that nothing is compared with it."]
    loss, rate, window, int8 = (row.numbers[name].mean for name in wanted)
    return [
        f"{row.label} reaches a loss of {loss:.3f} nats with a sink rate of {rate:.1f} %, and loses {window:.3f} nats in a "
        f"window without sinks and {int8:.4f} by 8 bits."
    ]


def _of_trigger(rows: Sequence[Row], cannot: Mapping[str, str]) -> list[str]:
    shares = {row.label: _mean(row, "trigger_solved") for row in rows if row.label not in cannot}
    solved = [label for label, share in shares.items() if share == 1.0]
    partly = [label for label, share in shares.items() if share is not None and share < 1.0]
    sentences = [f"The trigger task is learned with every seed by {_list(solved)}."] if solved else []
    sentences += [f"Not with every seed within the cap: {_list(partly)}."] if partly else []
    if cannot:
        sentences.append(
            f"That {_list(list(cannot))} cannot do it is provable, and says that the task wants a mean, not that such heads "
            "cannot be silent."
        )
    return sentences


def _of_rate(rows: Sequence[Row]) -> list[str]:
    broken = [row.label for row in rows if (_mean(row, "fast_diverged") or 0.0) > 0.0]
    gaps = {row.label: row.numbers["fast_gap"].mean for row in rows if "fast_gap" in row.numbers and row.label not in broken}
    bearing = [label for label, gap in gaps.items() if gap < LOST]
    sentences = []
    if broken:
        sentences.append(f"At four times the learning rate some runs diverge with {_list(broken)}.")
    if gaps:
        most = max(gaps, key=gaps.__getitem__)
        sentences.append(
            f"Four times the learning rate costs less than {LOST} nats with {_list(bearing) if bearing else 'no operation'}, "
            f"and most, {gaps[most]:.3f}, with {most}."
        )
    return sentences


def _of_cost(others: Sequence[Row]) -> list[str]:
    times = {row.label: row.numbers["train_time_long"] for row in others if "train_time_long" in row.numbers}
    if not times:
        return []
    least, most = (choose(times, key=lambda label: times[label].mean) for choose in (min, max))
    return [
        f"In long rows a training step takes {times[least].mean:.2f} times as long as with softmax with {least} and "
        f"{times[most].mean:.2f} times with {most} (medians, in turns on one machine; it is this code that is timed)."
    ]


def _limits(scale: str) -> str:
    bounds = ", ".join(f"{bound.name} < {bound.less_than:g} {bound.unit}" for bound in BOUNDS)
    small = " Models this small have few heads and no massive activations to speak of; large ones may rank otherwise."
    return f"The bounds ({bounds}) were fixed before the runs.{small if scale in ('tiny', 'small') else ''}"


def _mean(row: Row, column: str) -> float | None:
    return row.numbers[column].mean if column in row.numbers else None


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _answer(row: Row) -> str:
    why = row.named("not reproduced") or (row.named("inconclusive") if row.answer == "undecided" else [])
    answer = "reference" if row.label == REFERENCE else row.answer
    return f"{answer}: {', '.join(why)}" if why else answer
