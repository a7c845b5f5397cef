"""What low distortion and an equal loss mean, fixed before any result; which pathways have them, and which no other one beats.

A pathway is *low-distortion* if, in a model trained with it instead of softmax on the same data for the same number of steps,
with as many parameters, each at its own best learning rate, giving heads a way to do nothing costs no loss and leaves nothing
behind that makes the model harder to use:

    loss        its held-out loss is less than 0.02 nats above that of softmax with the same seed;
    sink        fewer than 5 % of heads sink on the first token (Gu et al. 2024: 0.4 to 0.8 % without a sink, 18 % with one),
                both by weight times gate and by the share of a row;
    activations the first token's hidden state is less than 2 times as long as others (theirs: 1.0 to 1.5, and 20 with a sink);
    window      a window without sinks costs less than 0.02 nats;
    int8        8-bit weights and activations cost less than 0.02 nats.

Each is judged over seeds as a part of a claim is. All five must hold; one that fails is enough for "no".

Beside that, the *loss* is compared with that of softmax in both directions, by differences at the same seed, with a margin of
0.02 nats (one percent of the loss at the smallest scale, and what eight seeds can tell). Two one-sided tests at 5 % each are an
interval of 90 % (Schuirmann 1987, doi 10.1007/BF01068419): inside the margins the losses are "equivalent", wholly beyond them
the operation is "better" or "worse", and otherwise it is "undecided". The tests are not corrected for their number.

Loss, sink and window are asked a second time at the rate of the scale, since softmax may have no sink at its own; of natural
text the bound on the window and the distortion are on ``sink_worth``. docs/claims.md says when, and with which results in view,
these two were decided.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from sinklab.jobs.estimate import SEEDS, Method, estimate_mean
from sinklab.results.record import to_json
from sinklab_claims.contract.claim import Part
from sinklab_claims.contract.effect import Difference, Effect, Least, Value
from sinklab_claims.pathways.columns import COLUMNS, ON_NATURAL_TEXT
from sinklab_claims.pathways.operations import REFERENCE
from sinklab_claims.pathways.runs import Choice
from sinklab_claims.verdict.rule import MOST_LOST, Finding, judge_part

__all__ = ["MARGIN", "PROTOCOL", "Summary", "compared", "judged", "pareto", "summarised"]

Answer = Literal["yes", "no", "undecided"]
Beside = Literal["equivalent", "better", "worse", "undecided"]

PROTOCOL = 2
"""Of the comparison, in its record. The first had one learning rate, one base, unmatched parameters and a bound on the map."""

MARGIN = 0.02
"""Nats of loss that are a difference; see the top of this file."""

LEVEL = 0.90
"""Of the interval that two one-sided tests at 5 % make."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """One of the things that low distortion asks for; ``against`` softmax with the same seed, or as it is.

    With ``also``, another column, the smaller of the two numbers is bounded.
    """

    name: str
    column: str
    less_than: float
    against: bool = False
    also: str = ""

    def part(self, label: str) -> Part:
        """The question about one operation."""
        effect: Effect = Difference(self.column, label, REFERENCE) if self.against else Value(self.column, label)
        if self.also:
            effect = Least((self.column, self.also), label)
        return Part(self.name, effect, less_than=self.less_than)


BOUNDS: tuple[Bound, ...] = (
    Bound("loss", "held_out_loss", 0.02, against=True),
    Bound("sink", "effective_sink_rate", 5.0, also="sink_rate"),
    Bound("activations", "hidden_ratio", 2.0),
    Bound("window", "window_gap", 0.02),
    Bound("int8", "int8_gap", 0.02),
)
"""See the top of this file."""

AT_ONE_RATE: tuple[Bound, ...] = (
    Bound("loss", "scale_rate_loss", 0.02, against=True),
    Bound("sink", "scale_rate_sink", 5.0),
    Bound("window", "scale_rate_window", 0.02),
)
"""Those of the same names, for all operations at the rate of the scale."""

ON_THE_PLOT = ("held_out_loss", "distortion")
"""Columns of which no other operation has both lower. Where more than a quarter of the trainings have none, the others do not
speak for them, as of every bound."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """One number of one operation over seeds.

    Attributes:
        mean: over what could be measured, of a ratio the geometric one.
        low, high: 95 % interval from three seeds on, as bounds have it (of rates: none); otherwise,
            of a few values that are all alike, and of what is proved, ``None``.
        count: seeds with a number (of rates: those of the selection).
        method: how the interval was taken; ``None`` without one.
    """

    mean: float
    low: float | None
    high: float | None
    count: int
    method: Method | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The loss of one operation less that of softmax, in nats; the interval is of 90 %, by Student's t."""

    by_seed: dict[int, float]
    mean: float | None
    interval: tuple[float, float] | None
    answer: Beside

    level: float = LEVEL
    margin: float = MARGIN


def compared(label: str, numbers: Mapping[int, Mapping[str, Mapping[str, float]]]) -> Comparison:
    """The two one-sided tests of the loss of one operation against that of softmax with the same seed."""
    difference = Difference("held_out_loss", label, REFERENCE)
    by_seed = {seed: own for seed, of_seed in numbers.items() if (own := difference(of_seed)) is not None}
    values = list(by_seed.values())
    if len(values) < SEEDS:
        return Comparison(by_seed, statistics.fmean(values) if values else None, None, "undecided")
    estimate = estimate_mean(values, LEVEL)
    answer: Beside = "undecided"
    lost = len(numbers) - len(values)  # diverged, for instance: as of every bound, the others cannot speak for them
    if estimate.interval is not None and lost <= MOST_LOST * len(numbers):
        low, high = estimate.interval
        if low > -MARGIN and high < MARGIN:
            answer = "equivalent"
        elif high <= -MARGIN or low >= MARGIN:
            answer = "better" if high <= -MARGIN else "worse"
    return Comparison(by_seed, estimate.middle, estimate.interval, answer)


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found about one operation.

    Attributes:
        numbers: column to its summary; columns without a number are absent.
        findings: name of the bound to what was found; ``at_one_rate`` of those that are asked at one rate for all.
        best: no other operation has both a lower mean loss and a lower mean distortion; of operations of which enough trainings
            have numbers.
        beside: its loss beside that of softmax; ``None`` for softmax itself.
        choice: its learning rate; ``None`` where none was chosen by trainings.
    """

    label: str
    numbers: dict[str, Summary]
    findings: dict[str, Finding]
    best: bool
    beside: Comparison | None = None
    choice: Choice | None = None
    at_one_rate: dict[str, Finding] = dataclasses.field(default_factory=dict)

    @property
    def answer(self) -> Answer:
        """Whether it is low-distortion."""
        return together(self.findings)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "label": self.label,
            "low_distortion": self.answer,
            "non_dominated": self.best,
            "beside_softmax": None if self.beside is None else to_json(self.beside),
            "rate": None if self.choice is None else self.choice.to_dict(),
            "bounds": {name: to_json(finding.record()) for name, finding in self.findings.items()},
            "bounds_at_one_rate": {name: to_json(finding.record()) for name, finding in self.at_one_rate.items()},
            "replacement": replacement(self),
            "numbers": {name: to_json(number) for name, number in self.numbers.items()},
        }


def judged(
    labels: Sequence[str],
    numbers: Mapping[int, Mapping[str, Mapping[str, float]]],
    choices: Mapping[str, Choice] = MappingProxyType({}),
    *,
    cannot: Collection[str] = (),
    one_rate: bool = False,
    natural: bool = False,
) -> list[Row]:
    """The rows of the table.

    Args:
        numbers: seed to label to column to number, of the seeds of the evaluation.
        cannot: labels of operations that provably cannot do the trigger task, whose seeds are no draw.
        one_rate: all were trained at one learning rate and no other, so that the numbers of the evaluation are those at it.
        natural: the text is natural, so that a window loses context, too.
    """
    summaries = {label: summarised(label, numbers) for label in labels}
    for label in cannot:  # whose seeds are no draw
        if (solved := summaries[label].get("trigger_solved")) is not None:
            summaries[label]["trigger_solved"] = dataclasses.replace(solved, low=None, high=None, method=None)
    for label, choice in choices.items():
        summaries[label] |= {name: Summary(value, None, None, len(choice.seeds)) for name, value in choice.numbers.items()}
    points = {
        label: (of[ON_THE_PLOT[0]].mean, of[ON_THE_PLOT[1]].mean)
        for label, of in summaries.items()
        if set(ON_THE_PLOT) <= of.keys() and _has_enough(of, len(numbers))
    }
    best = pareto(points)
    bounds, at_one = (_of_text(some, natural) for some in (BOUNDS, AT_ONE_RATE))
    names = {bound.name for bound in at_one}
    at_one_rate = [bound for bound in bounds if bound.name in names] if one_rate else at_one
    # Of an operation without numbers there, whose trainings all diverged, they are open, as those at its own rate are.
    measured = all(bound.column in summaries.get(REFERENCE, {}) for bound in at_one_rate)
    return [
        Row(
            label,
            summaries[label],
            _findings(bounds, label, numbers),
            label in best,
            beside=None if label == REFERENCE else compared(label, numbers),
            choice=choices.get(label),
            at_one_rate=_findings(at_one_rate, label, numbers) if measured else {},
        )
        for label in labels
    ]


def _has_enough(summaries: Mapping[str, Summary], seeds: int) -> bool:
    """Whether few seeds lack the numbers of the plot."""
    return all(seeds - summaries[name].count <= MOST_LOST * seeds for name in ON_THE_PLOT)


def _of_text(bounds: Sequence[Bound], natural: bool) -> list[Bound]:
    """The bounds, on the columns that a kind of text asks for."""
    if not natural:
        return list(bounds)
    return [dataclasses.replace(bound, column=ON_NATURAL_TEXT.get(bound.column, bound.column)) for bound in bounds]


def _findings(
    bounds: Sequence[Bound], label: str, numbers: Mapping[int, Mapping[str, Mapping[str, float]]]
) -> dict[str, Finding]:
    """Each bound by its name; softmax is not compared with itself."""
    applicable = [bound for bound in bounds if not (bound.against and label == REFERENCE)]
    return {bound.name: judge_part(bound.part(label), numbers) for bound in applicable}


def together(findings: Mapping[str, Finding]) -> Answer:
    """Yes if all hold, no if one fails, and undecided otherwise."""
    verdicts = [finding.verdict for finding in findings.values()]
    if "not reproduced" in verdicts:
        return "no"
    return "yes" if all(verdict == "reproduced" for verdict in verdicts) else "undecided"


def replacement(row: Row) -> dict[str, object] | None:
    """Whether it does without the sink of softmax, all at one rate: the answer, and the bounds that fail or are open."""
    if row.label == REFERENCE or not row.at_one_rate:
        return None
    answer = together(row.at_one_rate)
    verdict = {"yes": "", "no": "not reproduced", "undecided": "inconclusive"}[answer]
    return {"answer": answer, "bounds": [name for name, finding in row.at_one_rate.items() if finding.verdict == verdict]}


def summarised(label: str, numbers: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, Summary]:
    """Columns of one operation over the seeds; those without any number are absent."""
    summaries = {}
    for column in COLUMNS:
        values = [by_label[label][column.name] for by_label in numbers.values() if column.name in by_label.get(label, {})]
        if len(values) >= SEEDS:
            of = Value(column.name, label).estimate(values)
            low, high = of.interval or (None, None)
            summaries[column.name] = Summary(of.middle, low, high, len(values), of.method if of.interval else None)
        elif values:
            summaries[column.name] = Summary(sum(values) / len(values), None, None, len(values))
    return summaries


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Labels that no other point beats, from the lowest first coordinate on; lower is better in both.

    A point beats another if it is nowhere worse and somewhere better; of equal points all stay.
    """
    best = [
        label for label, (x, y) in points.items() if not any(a <= x and b <= y and (a < x or b < y) for a, b in points.values())
    ]
    return sorted(best, key=lambda label: points[label])
