"""The comparison as Markdown: a table of what decides, and one of every number by what it is about."""

from __future__ import annotations

from collections.abc import Sequence

from sinklab.jobs.verdict import SEEDS
from sinklab.studies.pathways.columns import COLUMNS, DECIDING, ON_NATURAL_TEXT, TABLES, Column
from sinklab.studies.pathways.judging import Row, Summary, replacement, sink_to_replace
from sinklab.studies.pathways.operations import REFERENCE
from sinklab.studies.pathways.words import Words, definition

__all__ = ["all_tables", "beside", "cell", "deciding_table", "page"]


def page(rows: Sequence[Row], words: Words, rate: float | None = None, *, natural: bool = False) -> str:
    """``pathways.md``: the definition, the table of what decides, the paragraph, what else is said, and all numbers.

    Args:
        rate: the one learning rate of all trainings, over that of the scale; ``None`` where each operation has its own.
        natural: the text is natural.
    """
    said = "".join(f"- **{about}.** {text}\n" for about, text in words.statements.items())
    answers = deciding_table(rows, rate, natural=natural)
    return f"{definition(rate, natural=natural)}\n\n{answers}\n{words.paragraph}\n\n{said}\n{all_tables(rows)}"


def deciding_table(rows: Sequence[Row], rate: float | None = None, *, natural: bool = False) -> str:
    """What is asked of every operation, with the answers and the numbers on which they rest."""
    answers = [("low-distortion", [_answer(row) for row in rows])]
    if len({row.seeds for row in rows}) > 1:
        answers.append(("seeds", [seeds_in_words(row.seeds) for row in rows]))
    if sink_to_replace(rows):
        answers.append((f"replaces the sink at ×{1 if rate is None else rate:g}", [_replaces(row) for row in rows]))
    answers.append(("loss beside softmax (nats)", [beside(row) for row in rows]))
    deciding = {ON_NATURAL_TEXT.get(name, name) if natural else name for name in DECIDING}
    return _table(rows, answers, [column for column in COLUMNS if column.name in deciding])


def all_tables(rows: Sequence[Row]) -> str:
    """Every number, in one table for what it is about."""
    parts = []
    for about, heading in TABLES.items():
        columns = [column for column in COLUMNS if column.about == about]
        if any(column.name in row.numbers for column in columns for row in rows):
            parts.append(f"**{heading}**\n\n{_table(rows, [], columns)}")
    return "\n".join(parts)


def _table(rows: Sequence[Row], answers: Sequence[tuple[str, Sequence[str]]], columns: Sequence[Column]) -> str:
    """One row an operation; columns that nothing was measured for are left out."""
    columns = [column for column in columns if any(column.name in row.numbers for row in rows)]
    headings = ["operation", *(heading for heading, _ in answers)]
    headings += [f"{column.heading} ({column.metric.unit})" for column in columns]
    lines = ["| " + " | ".join(headings) + " |", "|---" * (1 + len(answers)) + "|---:" * len(columns) + "|"]
    for number, row in enumerate(rows):
        cells = [given[number] for _, given in answers]
        cells += [cell(row.numbers.get(column.name), column) + _end(row, column) for column in columns]
        lines.append("| " + " | ".join([f"`{row.label}`", *cells]) + " |")
    return "\n".join(lines) + "\n"


def cell(summary: Summary | None, column: Column) -> str:
    """A number with its interval, or half the width of one with equal halves; of times with quartiles; a dash without any."""
    if summary is None:
        return "–"
    text = column.written(summary.mean)
    if column.source == "rates":
        return text
    if summary.low is None or summary.high is None:  # too few seeds, or values that are all alike
        return text if summary.count >= SEEDS else f"{text} (n = {summary.count})"
    if summary.low == summary.high:
        return text
    if column.source == "cost":
        return f"{text} ({column.written(summary.low)}–{column.written(summary.high)})"
    if summary.method == "Student's t":
        return f"{text} ± {column.written((summary.high - summary.low) / 2)}"
    return f"{text} ({column.written(summary.low)} to {column.written(summary.high)})"


def beside(row: Row) -> str:
    """How the loss of an operation compares with that of softmax, with the mean difference and its 90 % interval."""
    comparison = row.beside
    if comparison is None:
        return "–"
    if comparison.mean is None or comparison.interval is None:
        return comparison.answer
    return f"{comparison.answer}: {comparison.mean:+z.3f} ({comparison.interval[0]:+z.3f} to {comparison.interval[1]:+z.3f})"


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Runs of seeds as their ends: ``0–2``, ``0–2, 5``."""
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _end(row: Row, column: Column) -> str:
    """Said beside a rate that is the end of the range: one outside may be better."""
    return f" ({row.choice.end} tried)" if column.name == "chosen_factor" and row.choice is not None and row.choice.end else ""


def _replaces(row: Row) -> str:
    if row.label == REFERENCE or not row.at_one_rate:
        return "–"
    answer, what = replacement(row)
    return f"{answer}: {', '.join(what)}" if what else answer


def _answer(row: Row) -> str:
    why = row.named("not reproduced") or (row.named("inconclusive") if row.answer == "undecided" else [])
    answer = "reference" if row.label == REFERENCE else row.answer
    return f"{answer}: {', '.join(why)}" if why else answer
