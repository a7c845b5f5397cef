"""The outcome of one task: every policy with its interval, the verdict in a sentence, and the curves, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinklab.results.intervals import mean_over_items
from sinklab.studies.depend.contenders import Contenders
from sinklab.studies.depend.judge import Judgement, judge

__all__ = ["outcome"]


def outcome(
    facts: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    contenders: Contenders,
    *,
    chance: float | None,
    minimal_effect: float,
    scale: float | None,
    level: float,
    refused: Mapping[str, str],
    means: Mapping[str, Mapping[str, float]],
    curves: Mapping[str, Sequence[tuple[int, np.ndarray]]],
    lengths: Mapping[str, int | None],
) -> dict[str, Any]:
    """One entry of ``summary.json``.

    Args:
        facts: ``task``, ``metric``, ``unit``, ``axis`` and whatever else is to be said of the task.
        values: policy to one number an item, over the questions that count.
        chance, minimal_effect, scale, level: as for :func:`~sinklab.studies.depend.judge.judge`.
        refused: policies that the model cannot run, with the reason.
        means: policy to other metrics, meaned over the same questions.
        curves: policy to (place, one number an item).
        lengths: policy to its effective length.
    """
    judged, without = values[contenders.with_sinks], values[contenders.without]
    judgement = judge(
        judged, without, values[contenders.floor], minimal_effect=minimal_effect, chance=chance, scale=scale, level=level
    )
    shown: list[dict[str, Any]] = []
    for name in contenders.policies:
        if name in refused:
            shown.append({"policy": name, "refused": refused[name]})
            continue
        difference = None
        if name != contenders.without:
            difference = mean_over_items(values[name] - without, level=level, scale=scale).to_dict()
        score = mean_over_items(values[name], level=level, scale=scale).to_dict()
        shown.append(
            {
                "policy": name,
                "score": score,
                "difference": difference,
                "effective_length": lengths.get(name),
                "means": dict(means.get(name, {})),
            }
        )
    return {
        **facts,
        "items": len(without),
        "window": contenders.budget,
        "with_sinks": contenders.with_sinks,
        "without": contenders.without,
        "chance": chance,
        "minimal_effect": minimal_effect,
        "verdict": judgement.verdict,
        "sentence": _sentence(facts, contenders, judgement, len(without)),
        "difference": judgement.difference.to_dict(),
        "reason": judgement.reason,
        "policies": shown,
        "curves": {
            name: [{"at": at, **mean_over_items(numbers, level=level, scale=scale).to_dict()} for at, numbers in curve]
            for name, curve in curves.items()
        },
    }


def _sentence(facts: Mapping[str, object], contenders: Contenders, judgement: Judgement, items: int) -> str:
    unit = "" if facts["unit"] == "fraction" else f" {facts['unit']}"
    difference = judgement.difference
    return (
        f"{facts['task']} depends on the sink tokens: {judgement.verdict}. {contenders.with_sinks} less {contenders.without}: "
        f"{difference.mean:+.3f}{unit} [{difference.low:+.3f}, {difference.high:+.3f}] over {items} items; {judgement.reason}."
    )
