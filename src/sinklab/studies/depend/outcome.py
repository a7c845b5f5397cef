"""The outcome of one task: every policy with its interval, the verdict in a sentence, curves and grid, ready for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from sinklab.results.intervals import Interval, mean_over_items, rare_cost
from sinklab.results.naming import counted
from sinklab.studies.depend.conditions import Cell, Condition, ConditionPlan, pairs
from sinklab.studies.depend.contenders import Contenders
from sinklab.studies.depend.dependence import Dependence, measure_dependence
from sinklab.studies.depend.judge import Judgement, judge
from sinklab.studies.depend.words import index_text

__all__ = ["Facts", "Measured", "dependence_sentence", "outcome"]


class Facts(TypedDict):
    """What is to be said of a task."""

    task: str
    metric: str
    unit: str
    axis: str | None
    questions: NotRequired[int]
    documents: NotRequired[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """One number for each item under every condition, over the questions that count, the same items in the same order.

    Attributes:
        refused: conditions that the model cannot be read under, with the reason.
        chance, minimal_effect, scale, level: as for :func:`~sinklab.studies.depend.judge.judge`.
    """

    values: Mapping[Condition, np.ndarray]
    refused: Mapping[Condition, str]
    chance: float | None
    minimal_effect: float
    scale: float | None
    level: float

    def difference(self, one: np.ndarray, other: np.ndarray) -> Interval:
        """Of the mean difference of two scores, paired by items."""
        return mean_over_items(one - other, level=self.level, scale=self.scale, paired=True)

    def score(self, values: np.ndarray) -> Interval:
        """Of a mean score; one in a fixed range is that of a share, and so is its interval."""
        interval = mean_over_items(values, level=self.level, scale=self.scale)
        if self.scale is None:
            return interval
        return Interval(interval.mean, max(0.0, interval.low), min(self.scale, interval.high))

    def dependence(self, visible: np.ndarray, hidden: np.ndarray, floor: np.ndarray) -> Dependence:
        """See :func:`~sinklab.studies.depend.dependence.measure_dependence`."""
        return measure_dependence(visible, hidden, floor, chance=self.chance, scale=self.scale, level=self.level)


def outcome(
    facts: Facts,
    measured: Measured,
    plan: ConditionPlan,
    *,
    means: Mapping[str, Mapping[str, float]],
    curves: Mapping[str, Sequence[tuple[int, np.ndarray]]],
    lengths: Mapping[str, int | None],
) -> dict[str, Any]:
    """One entry of ``summary.json``.

    Args:
        means: policy to other metrics at the reference, meaned over the same questions.
        curves: policy to (place, one number an item).
        lengths: policy to its effective length.
    """
    contenders = plan.contenders
    values = {name: measured.values.get(plan.of_policy(name)) for name in contenders.policies}
    judged, without, floor = (
        measured.values[plan.of_policy(name)] for name in (contenders.with_sinks, contenders.without, contenders.floor)
    )
    judgement = judge(
        judged, without, floor,
        minimal_effect=measured.minimal_effect, chance=measured.chance, scale=measured.scale, level=measured.level,
    )  # fmt: skip
    shown: list[dict[str, Any]] = []
    for name, scores in values.items():
        if scores is None:
            shown.append({"policy": name, "refused": measured.refused[plan.of_policy(name)]})
            continue
        shown.append(
            {
                "policy": name,
                "score": measured.score(scores).to_dict(),
                "difference": None if name == contenders.without else measured.difference(scores, without).to_dict(),
                "effective_length": lengths.get(name),
                "means": dict(means.get(name, {})),
            }
        )
    dependence = measured.dependence(judged, without, floor)
    return {
        **facts,
        "items": len(without),
        "window": contenders.budget,
        "with_sinks": contenders.with_sinks,
        "without": contenders.without,
        "chance": measured.chance,
        "minimal_effect": measured.minimal_effect,
        "verdict": judgement.verdict,
        "sentence": _sentence(facts, contenders, judgement, len(without)),
        "difference": judgement.difference.to_dict(),
        "reason": judgement.reason,
        "dependence": _entry(dependence),
        "dependence_sentence": dependence_sentence(facts["task"], measured.chance, dependence),
        "policies": shown,
        "curves": {
            name: [{"at": at, **measured.score(numbers).to_dict()} for at, numbers in curve] for name, curve in curves.items()
        },
        "grid": _grid(measured, plan, judged, floor) if plan.grid else [],
    }


def _grid(measured: Measured, plan: ConditionPlan, reference: np.ndarray, floor: np.ndarray) -> list[dict[str, Any]]:
    """Pairs of cells, with the sink visible and hidden."""
    entries = []
    for visible, hidden in pairs(plan.cells):
        sides = {"visible": _side(measured, visible, reference, floor), "hidden": _side(measured, hidden, reference, floor)}
        seen, unseen = (
            measured.values.get(cell.condition) if cell is not None and cell.condition is not None else None
            for cell in (visible, hidden)
        )
        entry: dict[str, Any] = {
            "bos": visible.bos,
            "policy": visible.policy,
            "bits": visible.bits,
            **sides,
            "difference": None,
            "dependence": None,
        }
        if seen is not None and unseen is not None:
            entry["difference"] = measured.difference(seen, unseen).to_dict()
            entry["dependence"] = _entry(measured.dependence(seen, unseen, floor))
        entries.append(entry)
    return entries


def _side(measured: Measured, cell: Cell | None, reference: np.ndarray, floor: np.ndarray) -> dict[str, Any] | None:
    """One cell: its score and what it loses against the reference; ``refused`` with the reason if there is none."""
    if cell is None:
        return None
    if cell.condition is None or cell.condition in measured.refused:
        return {"refused": cell.reason if cell.condition is None else measured.refused[cell.condition]}
    values = measured.values[cell.condition]
    lost = measured.dependence(reference, values, floor)
    if values is reference and lost.index is not None:
        lost = Dependence(Interval(0.0, 0.0, 0.0))  # it is one reading, not two that agree
    return {"read": cell.condition.label, "score": measured.score(values).to_dict(), "lost": _entry(lost)}


def _entry(dependence: Dependence) -> dict[str, Any]:
    """For JSON: an interval, or why there is none."""
    return {"refused": dependence.reason} if dependence.index is None else dependence.index.to_dict()


def _sentence(facts: Facts, contenders: Contenders, judgement: Judgement, items: int) -> str:
    unit = "" if facts["unit"] == "fraction" else f" {facts['unit']}"
    difference = judgement.difference
    rare = f" {rare_cost(items, 'item')}" if judgement.verdict == "no" else ""  # of means, which hide what few items have
    return (
        f"{facts['task']} depends on the sink tokens: {judgement.verdict}. {contenders.with_sinks} less {contenders.without}: "
        f"{difference.mean:+z.3f}{unit} [{difference.low:+z.3f}, {difference.high:+z.3f}] over {counted(items, 'item')}; "
        f"{judgement.reason}.{rare}"
    )


def dependence_sentence(task: str, chance: float | None, dependence: Dependence) -> str:
    """The index in words."""
    index = dependence.index
    if index is None:
        return f"{task}: {dependence.reason}."
    above = "what one token of context gives" if chance is None else f"chance ({chance:g})"
    interval = index_text(index.to_dict())
    if index.low > 0.0:
        return f"{task}: index of dependence {interval}: {_percent(index.mean)} of the score above {above} goes with the sink."
    if index.high < 0.0:
        return (
            f"{task}: index of dependence {interval}: {_percent(-index.mean)} of the score above {above} goes while the sink "
            "stays."
        )
    most = f"none to {_percent(index.high)}" if index.high > 0.0 else "none"
    text = f"{task}: index of dependence {interval}: {most} of the score above {above} goes with the sink"
    return f"{text}, or up to {_percent(-index.low)} of it while the sink stays." if index.low < 0.0 else f"{text}."


def _percent(share: float) -> str:
    """Whole percents, of less than one the first digit: what an interval keeps apart from 0 is not said to be 0."""
    return f"{100 * share:.0f} %" if share >= 0.00995 else f"{100 * share:.1g} %"
