"""What low distortion means, fixed before any result, and which pathways have it; and which of them no other one beats.

A pathway is *low-distortion* if, in a model trained with it instead of softmax on the same data for the same number of steps,
giving heads a way to do nothing costs no loss and leaves nothing behind that makes the model harder to use:

    loss        its held-out loss is less than 0.02 nats above that of softmax with the same seed;
    sink        fewer than 5 % of heads sink on the first token (Gu et al. 2024: 0.4 to 0.8 % without a sink, 18 % with one);
    activations the first token's hidden state is less than 2 times as long as others (theirs: 1.0 to 1.5, and 20 with a sink);
    window      a window without sinks costs less than 0.02 nats;
    int8        8-bit weights and activations cost less than 0.02 nats.

Each is judged over seeds as a part of a claim is: it holds if the 95 % interval lies inside the bound, fails if the interval
lies outside, and is undecided otherwise. All five must hold; one that fails is enough for "no".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from sinklab.jobs.claim import Difference, Effect, Part, Value
from sinklab.jobs.verdict import Finding, judge_part
from sinklab.results.statistics import mean_interval
from sinklab.studies.pathways.columns import COLUMNS
from sinklab.studies.pathways.operations import REFERENCE

__all__ = ["BOUNDS", "Answer", "Bound", "Row", "Summary", "judged", "pareto", "summarised"]

Answer = Literal["yes", "no", "undecided"]


@dataclasses.dataclass(frozen=True)
class Bound:
    """One of the things that low distortion asks for; ``against`` softmax with the same seed, or as it is."""

    name: str
    column: str
    less_than: float
    against: bool = False

    @property
    def unit(self) -> str:
        """Of what is bounded."""
        return self.part(REFERENCE).effect.unit

    def part(self, label: str) -> Part:
        """The question about one operation."""
        effect: Effect = Difference(self.column, label, REFERENCE) if self.against else Value(self.column, label)
        return Part(self.name, effect, less_than=self.less_than)


BOUNDS: tuple[Bound, ...] = (
    Bound("loss", "held_out_loss", 0.02, against=True),
    Bound("sink", "sink_rate", 5.0),
    Bound("activations", "hidden_ratio", 2.0),
    Bound("window", "window_gap", 0.02),
    Bound("int8", "int8_gap", 0.02),
)
"""See the top of this file."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """One number of one operation over seeds (of cost: over rounds).

    Attributes:
        mean: over what could be measured (of cost: the median).
        low, high: 95 % interval, Student's t, from three seeds on (of cost: the quartiles); otherwise ``None``.
        count: seeds with a number (of cost: 1).
    """

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found about one operation.

    Attributes:
        numbers: column to its summary; columns without a number are absent.
        findings: name of the bound to what was found.
        answer: whether it is low-distortion.
        best: no other operation has both a lower loss and a lower distortion, by their means.
    """

    label: str
    numbers: dict[str, Summary]
    findings: dict[str, Finding]
    answer: Answer
    best: bool

    def named(self, verdict: str) -> list[str]:
        """Names of the bounds with that verdict."""
        return [name for name, finding in self.findings.items() if finding.verdict == verdict]

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "label": self.label,
            "low_distortion": self.answer,
            "non_dominated": self.best,
            "bounds": {name: finding.to_dict() for name, finding in self.findings.items()},
            "numbers": {name: dataclasses.asdict(number) for name, number in self.numbers.items()},
        }


def judged(
    labels: Sequence[str],
    numbers: Mapping[int, Mapping[str, Mapping[str, float]]],
    costs: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> list[Row]:
    """The rows of the table.

    Args:
        numbers: seed to label to column to number.
        costs: label to column to ``value``, ``low`` and ``high``.
    """
    summaries = {label: summarised(label, numbers) | _of_costs(costs.get(label, {})) for label in labels}
    points = {
        label: (found["held_out_loss"].mean, found["distortion"].mean)
        for label, found in summaries.items()
        if "held_out_loss" in found and "distortion" in found
    }
    best = set(pareto(points))
    rows = []
    for label in labels:
        findings = {
            bound.name: judge_part(bound.part(label), numbers) for bound in BOUNDS if not (bound.against and label == REFERENCE)
        }
        verdicts = [finding.verdict for finding in findings.values()]
        answer: Answer = "undecided"
        if "not reproduced" in verdicts:
            answer = "no"
        elif all(verdict == "reproduced" for verdict in verdicts):
            answer = "yes"
        rows.append(Row(label, summaries[label], findings, answer, label in best))
    return rows


def summarised(label: str, numbers: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, Summary]:
    """Columns of one operation over the seeds; those without any number are absent."""
    found = {}
    for column in COLUMNS:
        values = [by_label[label][column.name] for by_label in numbers.values() if column.name in by_label.get(label, {})]
        if len(values) >= 3:
            mean, half = mean_interval(values)
            found[column.name] = Summary(mean, mean - half, mean + half, len(values))
        elif values:
            found[column.name] = Summary(sum(values) / len(values), None, None, len(values))
    return found


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Labels that no other point beats, from the lowest first coordinate on; lower is better in both.

    A point beats another if it is nowhere worse and somewhere better; of equal points all stay.
    """
    best = [
        label for label, (x, y) in points.items() if not any(a <= x and b <= y and (a < x or b < y) for a, b in points.values())
    ]
    return sorted(best, key=lambda label: points[label])


def _of_costs(found: Mapping[str, Mapping[str, float]]) -> dict[str, Summary]:
    return {name: Summary(number["value"], number["low"], number["high"], 1) for name, number in found.items()}
