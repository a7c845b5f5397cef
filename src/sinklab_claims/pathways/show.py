"""The comparison in words that follow from the numbers by rules: a paragraph on the open question, and what else they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.naming import counted
from sinklab.results.run import Result
from sinklab_claims.contract.claim import Base, Scale, is_natural
from sinklab_claims.pathways.columns import COLUMNS, DECIDING, ON_NATURAL_TEXT, TABLES, Column
from sinklab_claims.pathways.judging import MARGIN, Beside, Row, Summary, replacement, sink_to_replace
from sinklab_claims.pathways.operations import REFERENCE, is_explicit
from sinklab_claims.reproduce.cells import DESCRIPTIONS
from sinklab_claims.verdict.rule import SEEDS

__all__ = [
    "DEFINITION",
    "OF_BASE",
    "Words",
    "all_tables",
    "beside",
    "cell",
    "deciding_table",
    "definition",
    "display",
    "figure_title",
    "in_words",
    "page",
]

OWN_RATE = "its own best of five learning rates"

WINDOW = "a window of a quarter of the context without sinks costs less than 0.02 nats"
WORTH = "of the cost of a window of a quarter of the context, the first four tokens give back less than 0.02 nats"

DEFINITION = (
    "A pathway is *low-distortion* if a model trained with it (the same data and number of steps, as many parameters as "
    f"softmax's, {OWN_RATE}) is inside five bounds:\n\n"
    "- **loss**: the held-out loss is less than 0.02 nats above that of softmax with the same seed;\n"
    "- **sink**: fewer than 5 % of heads sink on the first token, both by weight times gate and by the share of a row;\n"
    "- **activations**: the first hidden state is less than 2 times as long as others;\n"
    f"- **window**: {WINDOW};\n"
    "- **int8**: 8-bit weights and activations cost less than 0.02 nats.\n\n"
    "A bound holds if the 95 % interval over seeds lies inside it, fails if the interval lies outside, and is undecided "
    "otherwise. The loss is *equivalent* to softmax's if the 90 % interval of the differences at the same seed lies within "
    "0.02 nats of 0 (two one-sided tests at 5 %), *better* or *worse* if it lies wholly beyond, and undecided otherwise."
)
"""The definitions of :mod:`sinklab_claims.pathways.judging` in Markdown, by the names that tables and sentences use."""

OF_BASE: Mapping[Base, str] = {"bos": "with BOS", "no-bos": "without BOS"}


def definition(rate: float | None, *, natural: bool = False) -> str:
    """What low-distortion means where each operation has a learning rate of its own, or all have one; and on natural text."""
    text = DEFINITION.replace(WINDOW, WORTH) if natural else DEFINITION
    return text if rate is None else text.replace(OWN_RATE, _one_rate(rate))


def figure_title(scale: str, base: Base, seeds: int, rate: float | None = None) -> str:
    """What stands above the figure."""
    at_rate = "" if rate is None else f", learning rate ×{rate:g}"
    return f"Ways to do nothing, scale {scale}, {OF_BASE[base]}{at_rate}, {counted(seeds, 'seed')}, 95 % intervals"


@dataclasses.dataclass(frozen=True)
class Words:
    """What the numbers say.

    Attributes:
        paragraph: whether an explicit way to do nothing replaces the sink and is low-distortion.
        statements: the rest, each with what it is about.
    """

    paragraph: str
    statements: Mapping[str, str]

    def to_dict(self) -> dict[str, object]:
        """For ``summary`` and ``run.json``."""
        return {"paragraph": self.paragraph, "statements": dict(self.statements)}


def in_words(
    rows: Sequence[Row], cannot: Mapping[str, str], *, scale: Scale, base: Base, seeds: int, rate: float | None = None
) -> Words:
    """Which pathway replaces the sink or is low-distortion; a sentence is there only if the numbers support it.

    Args:
        rows: of :func:`~sinklab_claims.pathways.judging.judged`, the reference among them.
        cannot: operations that provably cannot do the trigger task.
        rate: the one learning rate of all trainings, over that of the scale; ``None`` where each operation has its own.
    """
    reference = next(row for row in rows if row.label == REFERENCE)
    others = [row for row in rows if row is not reference]
    models, _, _ = DESCRIPTIONS[scale].partition(";")
    setting = f"At the scale {scale} ({models}), {OF_BASE[base]}, over {_of_seeds(others, seeds)}:"
    natural = is_natural(scale)
    replaced, question = _of_what_replaces(rows, rate, natural), _of_the_question(rows, rate)
    answer = [setting, *_of_reference(reference, natural), *replaced, *question]
    statements = {
        "Loss": _of_loss(others, rate),
        "Learning rates": _of_rates(rows) if rate is None else _of_one_rate(rate),
        "Sinks at one rate": _of_sinks_at_one_rate(rows, rate),
        "Bounds at the own rates" if rate is None else "Bounds": _of_bounds(others),
        "Loss and distortion together": _of_front(rows),
        "Out of distribution": _of_robustness(rows),
        "Trigger task": _of_trigger(rows, cannot),
        "Time": _of_cost(others),
        "Limits": _limits(scale, one_rate_too=bool(replaced) and not rate),
    }
    return Words(" ".join(answer), {about: " ".join(sentences) for about, sentences in statements.items() if sentences})


def _of_seeds(others: Sequence[Row], seeds: int) -> str:
    """How many seeds there are, and how many each operation has where it has not all."""
    own = sorted({len(row.seeds) for row in others}) or [seeds]
    if own == [seeds]:
        return counted(seeds, "seed")
    span = f"{own[0]}" if len(own) == 1 else f"{own[0]} to {own[-1]}"
    return f"{counted(seeds, 'seed')} (each operation on {span} of them, beside {REFERENCE})"


def _of_bounds(others: Sequence[Row]) -> list[str]:
    """Which are inside all bounds, which outside of one, and which may be either."""
    inside = [row.label for row in others if row.answer == "yes"]
    failing = [f"{row.label} ({', '.join(row.named('not reproduced'))})" for row in others if row.answer == "no"]
    still_open = [f"{row.label} ({', '.join(row.named('inconclusive'))})" for row in others if row.answer == "undecided"]
    sentences = [f"Inside all of them: {_list(inside)}."] if inside else []
    sentences += [f"Not low-distortion (the failing bounds in brackets): {_list(failing)}."] if failing else []
    sentences += [f"Undecided (the open bounds in brackets): {_list(still_open)}."] if still_open else []
    return sentences


def _of_front(rows: Sequence[Row]) -> list[str]:
    """Those that no other one beats."""
    best = [row.label for row in rows if row.best]
    if not best:
        return []
    return [
        f"By the means, no operation has both a lower loss and a lower distortion than {_list(best)}. Neighbours on the plot "
        "may change places with other seeds."
    ]


def _of_loss(others: Sequence[Row], rate: float | None) -> list[str]:
    """What the two one-sided tests say."""
    answers: list[tuple[Beside, str]] = [
        ("better", "lower by 0.02 nats or more with"),
        ("worse", "higher by 0.02 nats or more with"),
        ("equivalent", "equivalent, within 0.02 nats, with"),
        ("undecided", "undecided with"),
    ]
    named = {
        answer: [row.label for row in others if row.beside is not None and row.beside.answer == answer] for answer, _ in answers
    }
    parts = [f"{words} {_list(named[answer])}" for answer, words in answers if named[answer]]
    if not parts:
        return []
    count = sum(map(len, named.values()))
    sentences = [f"Beside softmax's, the loss at {'the own rates' if rate is None else _one_rate(rate)} is {'; '.join(parts)}."]
    if count > 1:
        sentences.append(f"These are {count} comparisons, each by two tests at 5 %, not corrected for their number.")
    return sentences


def _of_one_rate(rate: float) -> list[str]:
    """What a comparison without a search of rates can say, and what not."""
    return [
        f"All operations are trained at {_one_rate(rate)}, without a search for better ones. An operation inside the bounds is "
        "there untuned; one outside may be inside at a rate of its own."
    ]


def _of_rates(rows: Sequence[Row]) -> list[str]:
    """How much the learning rate matters to the comparison."""
    return [*_of_tuning(rows), *_of_choices(rows), *_of_ranges(rows)]


def _of_tuning(rows: Sequence[Row]) -> Iterator[str]:
    """What a rate of its own gains an operation."""
    gains = {row.label: row.numbers["tuning_gain"].mean for row in rows if "tuning_gain" in row.numbers}
    if not gains:
        return
    most = max(gains, key=gains.__getitem__)
    if gains[most] > MARGIN:
        own = f" and softmax {gains[REFERENCE]:z.3f}" if REFERENCE in gains and most != REFERENCE else ""
        yield (
            f"A rate of its own, chosen on other seeds, gains {most} {gains[most]:z.3f} nats{own}: one rate for all would "
            f"misjudge {most}."
        )
    else:
        yield f"A rate of its own gains no operation more than {MARGIN} nats."


def _of_choices(rows: Sequence[Row]) -> Iterator[str]:
    """Operations whose best rate is an end of the range, or that have none."""
    choices = {row.label: row.choice for row in rows if row.choice is not None}
    ends = [f"{label} ({choice.end})" for label, choice in choices.items() if choice.end]
    if ends:
        yield f"The best rate is the end of the range, so that one outside may be better, with {_list(ends)}."
    none = [label for label, choice in choices.items() if choice.factor is None]
    if none:
        yield f"No learning rate could be chosen for {_list(none)}."


def _of_ranges(rows: Sequence[Row]) -> Iterator[str]:
    """How far the loss varies over the rates, and where trainings diverged."""
    ranges = {row.label: row.numbers["rate_range"].mean for row in rows if "rate_range" in row.numbers}
    if len(ranges) > 1:
        least, most = min(ranges, key=ranges.__getitem__), max(ranges, key=ranges.__getitem__)
        yield (
            f"Over the rates the loss varies least with {least} ({ranges[least]:.3f} nats) and most with {most} "
            f"({ranges[most]:.3f})."
        )
    diverged = [row.label for row in rows if (_mean(row, "rate_diverged") or 0.0) > 0.0]
    if diverged:
        yield f"Some trainings of the selection diverged with {_list(diverged)}."


def _of_sinks_at_one_rate(rows: Sequence[Row], rate: float | None) -> list[str]:
    """Which operations have a sink at the learning rate that all were trained at."""
    compared = [row for row in rows if row.at_one_rate]
    if len(compared) < 2 or not any(row.label == REFERENCE for row in compared):
        return []
    groups = {"not reproduced": "there is a sink", "reproduced": "there is none", "inconclusive": "it is undecided"}
    parts = []
    for verdict, said in groups.items():
        named = [
            f"{row.label} ({'not measured' if (mean := row.at_one_rate['sink'].mean) is None else f'{mean:.1f} %'})"
            for row in compared
            if row.at_one_rate["sink"].verdict == verdict
        ]
        parts += [f"{said} with {_list(named)}"] if named else []
    # Of a search that is scale_rate_sink, and else the bound itself, on the smaller of two rates of the first token.
    by = "have the first token as a sink" if rate is None else "sink on the first token by weight times gate and by share"
    return [f"At {_one_rate(rate)} for all, counting heads that {by}: {'; '.join(parts)}."]


def _of_what_replaces(rows: Sequence[Row], rate: float | None, natural: bool) -> list[str]:
    """Which operations have neither the sink of softmax nor its loss in a window, at no more loss, all at one rate."""
    reference = next(row for row in rows if row.label == REFERENCE)
    others = [row for row in rows if row is not reference and row.at_one_rate]
    if not sink_to_replace(rows) or not others:
        return []
    by_answer: dict[str, list[str]] = {"yes": [], "no": [], "undecided": []}
    for row in others:
        answer, what = replacement(row)
        by_answer[answer].append(f"{row.label} ({', '.join(what)})" if what else row.label)
    sink, lost = (reference.at_one_rate[name].mean for name in ("sink", "window"))
    worth = f"which is worth {lost:z.3f} nats in a window" if natural else f"and a window without it costs {lost:z.3f} nats"
    sentences = [
        f"At one rate for all, {_times(rate)}that of the scale, {REFERENCE} has a sink to replace: {sink:.1f} % of heads sink, "
        f"{worth}."
    ]
    if good := by_answer["yes"]:
        replace = "replaces" if len(good) == 1 else "replace"
        sentences.append(f"{_list(good)} {replace} it, with loss, sink and window inside the bounds.")
    else:
        sentences.append("No operation is shown to replace it, with loss, sink and window inside the bounds.")
    failing, still_open = by_answer["no"], by_answer["undecided"]
    sentences += [f"Not replaced (the failing bounds in brackets): {_list(failing)}."] if failing else []
    sentences += [f"Undecided (the open bounds in brackets): {_list(still_open)}."] if still_open else []
    return sentences


ROBUSTNESS = {
    "noise_gap": "replacing a tenth of the tokens",
    "other_language_gap": "another language",
    "false_sink_gap": "a false sink",
}
"""Column to what was done to the text."""


def _of_robustness(rows: Sequence[Row]) -> list[str]:
    """Operations that bear a change of the text worse or better than softmax by more than the margin, by mean differences."""
    reference = next(row for row in rows if row.label == REFERENCE)
    parts = []
    for column, words in ROBUSTNESS.items():
        usual = _mean(reference, column)
        if usual is None:
            continue
        less = {row.label: row.beyond[column] for row in rows if row is not reference and column in row.beyond}
        worse = [label for label, more in less.items() if more > MARGIN]
        better = [label for label, more in less.items() if more < -MARGIN]
        beyond = [f"more with {_list(worse)}"] if worse else []
        beyond += [f"less with {_list(better)}"] if better else []
        parts.append(f"{words} costs softmax {usual:z.3f} nats{', ' + ', '.join(beyond) if beyond else ''}")
    return [f"By means, and where more than {MARGIN} nats differ: {'; '.join(parts)}."] if parts else []


def _of_the_question(rows: Sequence[Row], rate: float | None) -> list[str]:
    """Whether there is an explicit low-distortion way to do nothing.

    Where softmax has no distortion either, a pathway without any has replaced nothing, and the question was not asked.
    """
    reference = next(row for row in rows if row.label == REFERENCE)
    explicit = [row for row in rows if row is not reference and is_explicit(row.label)]
    if not explicit:
        return []
    if reference.answer == "yes":
        return [_nothing_to_replace(explicit, rate)]
    sentences = [_of_explicit(explicit)]
    if reference.findings["sink"].verdict == "inconclusive":
        doubt = (
            "an operation with a sink at another rate may owe it to that rate"
            if rate is None
            else "it is not shown that there is one to replace"
        )
        sentences.append(f"Whether {REFERENCE} itself has a sink {_at_rate(rate)} is open, so that {doubt}.")
    without = [row.label for row in rows if row is not reference and not is_explicit(row.label) and row.answer == "yes"]
    if without:
        sentences.append(f"Of the others, {_list(without)} {'is' if len(without) == 1 else 'are'} low-distortion.")
    return [" ".join(sentences)]


def _nothing_to_replace(explicit: Sequence[Row], rate: float | None) -> str:
    at_rate = _at_rate(rate)
    words = (
        f"{at_rate[0].upper()}{at_rate[1:]} {REFERENCE} itself is inside every bound and has no sink to replace, so that "
        f"explicit ways to do nothing are not tested {'there' if rate is None else 'by this'}."
    )
    inside = [row.label for row in explicit if row.answer == "yes"]
    if inside:
        words += f" It says little that {_list(inside)} {'is' if len(inside) == 1 else 'are'} inside too."
    return words


def _of_explicit(explicit: Sequence[Row]) -> str:
    """Which explicit ways to do nothing are low-distortion, where softmax is not."""
    good = [row for row in explicit if row.answer == "yes"]
    if good:
        words = f"An explicit way to do nothing that is low-distortion exists here: {_list([row.label for row in good])}."
        better = [row.label for row in good if row.beside is not None and row.beside.answer == "better"]
        return words + (f" {_list(better)} {'has' if len(better) == 1 else 'have'} a lower loss too." if better else "")
    undecided = sum(row.answer == "undecided" for row in explicit)
    if undecided:
        return (
            "Whether an explicit way to do nothing is low-distortion is open here: shown of none, refuted of "
            f"{len(explicit) - undecided} of {len(explicit)}."
        )
    if len(explicit) == 1:
        return "The one explicit way to do nothing is not low-distortion here."
    return f"None of the {len(explicit)} explicit ways to do nothing is low-distortion here."


def _of_reference(row: Row, natural: bool) -> list[str]:
    metrics = ("held_out_loss", "effective_sink_rate", "sink_worth" if natural else "window_gap", "int8_gap")
    if not all(name in row.numbers for name in metrics):
        return [f"{row.label} could not be measured in full, so that nothing is compared with it."]
    loss, rate, window, int8 = (row.numbers[name].mean for name in metrics)
    reached = f"{row.label} reaches a loss of {loss:z.3f} nats; {rate:.1f} % of its heads sink."
    cost = f"8 bits cost it {int8:z.4f} nats"
    if natural:
        return [reached, f"{cost}; in a window its first four tokens give back {window:z.3f}."]
    return [reached, f"{cost}, a window without sinks {window:z.3f}."]


def _of_trigger(rows: Sequence[Row], cannot: Mapping[str, str]) -> list[str]:
    shares = {row.label: _mean(row, "trigger_solved") for row in rows if row.label not in cannot}
    solved = [label for label, share in shares.items() if share == 1.0]
    partly = [label for label, share in shares.items() if share is not None and share < 1.0]
    sentences = [f"The trigger task is learned with every seed by {_list(solved)}."] if solved else []
    sentences += [f"Not with every seed within the limit of steps: {_list(partly)}."] if partly else []
    if cannot:
        sentences.append(
            f"{_list(list(cannot))} provably cannot learn it, because the task needs a mean; it does not follow that such "
            "heads cannot be silent."
        )
    return sentences


def _of_cost(others: Sequence[Row]) -> list[str]:
    times = {row.label: row.numbers["train_time_long"] for row in others if "train_time_long" in row.numbers}
    if not times:
        return []
    least, most = (choose(times, key=lambda label: times[label].mean) for choose in (min, max))
    parts = [f"{times[label].mean:.2f} with {label}" for label in dict.fromkeys((least, most))]
    medians = "medians" if len(parts) > 1 else "median"
    return [
        f"The time of a training step on long rows, over that with softmax, is {' to '.join(parts)} ({medians} of this code, "
        "in turns on one machine)."
    ]


def _limits(scale: Scale, *, one_rate_too: bool) -> list[str]:
    sentences = ["The bounds and the margin were fixed before the runs."]
    if is_natural(scale):
        sentences.append(
            "That the bound on the window is on what the first four tokens give back of its loss was decided with results in "
            "view, since a window of natural text loses context besides."
        )
    if one_rate_too:
        sentences.append("That loss, sink and window are judged at one rate too was decided with results at that rate in view.")
    if scale in ("tiny", "small"):
        small = "Models this small have few heads and no massive activations (Sun et al. 2024)"
        sentences.append(f"{small}; in large ones the ranking may differ.")
    return sentences


def _one_rate(rate: float | None) -> str:
    return f"{_times(rate)}the rate of the scale"


def _at_rate(rate: float | None) -> str:
    return "at its own rate" if rate is None else f"at {_one_rate(rate)}"


def _times(rate: float | None) -> str:
    return "" if rate is None or rate == 1 else f"{rate:g} times "


def _mean(row: Row, column: str) -> float | None:
    return row.numbers[column].mean if column in row.numbers else None


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


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


def display(result: Result) -> Iterator[RenderableType]:
    """Means alone, one line a column, so that twelve operations fit; intervals are in pathways.md."""
    rows = result.summary["rows"]
    shown = Table(box=None, pad_edge=False)
    shown.add_column("mean over seeds")
    for row in rows:
        shown.add_column(escape(row["label"]), justify="right")
    shown.add_row("low-distortion", *("reference" if number == 0 else row["low_distortion"] for number, row in enumerate(rows)))
    answers = [row["beside_softmax"] for row in rows]
    shown.add_row("loss beside softmax", *("–" if answer is None else answer["answer"] for answer in answers))
    for column in COLUMNS:
        numbers = [row["numbers"].get(column.name) for row in rows]
        if any(numbers):
            cells = ("–" if number is None else column.written(number["mean"]) for number in numbers)
            shown.add_row(f"{column.heading} ({column.metric.unit})", *cells)
    yield shown
    yield Text(f"\n{result.summary['paragraph']}")
    for about, text in result.summary["statements"].items():
        yield f"\n[bold]{about}[/bold]  {escape(text)}"
    if result.folder is not None:
        yield Text(f"\nplot   {result.folder / 'pareto.svg'}\ntable  {result.folder / 'table.parquet'}")
