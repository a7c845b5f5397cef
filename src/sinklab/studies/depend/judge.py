"""The judge: whether a score depends on the sink tokens, and how long a context is of use under a policy; rules and words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from sinklab.results.intervals import Interval, mean_over_items

__all__ = ["Judgement", "Verdict", "effective_length", "judge", "useful_context"]

Verdict = Literal["yes", "no", "undecided"]

MINIMAL_GAIN = 0.01
"""Mean paired gain, in the unit of the score, from which a longer context is of use."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Whether a score depends on the sink tokens.

    Attributes:
        verdict: of a score that is above chance. ``yes``: the interval of the difference lies above the minimal effect. ``no``:
            it lies between minus and plus the minimal effect, and the score uses its context. ``undecided``: anything else, and
            a score at chance: what falls from there to below it is no knowledge that a sink could carry.
        difference: score with sinks less score without, at the same number of tokens held, over paired items.
        reason: why, in words that follow "because".
    """

    verdict: Verdict
    difference: Interval
    reason: str


def judge(
    with_sinks: np.ndarray,
    without: np.ndarray,
    floor: np.ndarray,
    *,
    minimal_effect: float,
    chance: float | None,
    scale: float | None,
    level: float = 0.95,
) -> Judgement:
    """Judge one score.

    Args:
        with_sinks, without, floor: one number for each item, the same items in the same order; the floor is a policy that
            keeps almost no token.
        minimal_effect: smallest difference that counts.
        chance: value of a model that knows nothing, or ``None``.
        scale: how far one item could change, for scores in a fixed range.
    """
    difference = mean_over_items(with_sinks - without, level=level, scale=scale, paired=True)
    effect = f"{minimal_effect:g}"
    # Two policies are looked at, so each interval leaves out half as much.
    best = max((mean_over_items(values, level=(1 + level) / 2, scale=scale) for values in (with_sinks, without)), key=_mean)
    if chance is not None and best.low <= chance:
        at_best = f"{best.mean:.3g} at best, and {chance:g} needs no model"
        reason = f"the model is not shown to be above chance, with sinks or without: {at_best}"
        return Judgement("undecided", difference, reason)
    if difference.low > minimal_effect:
        return Judgement("yes", difference, f"the whole interval of the difference lies above {effect}")
    if -minimal_effect <= difference.low and difference.high <= minimal_effect:
        use = max(
            (mean_over_items(values - floor, level=level, scale=scale, paired=True) for values in (with_sinks, without)),
            key=_mean,
        )
        if use.low <= 0.0:
            return Judgement(
                "undecided", difference, "the score is not shown to be better than with next to nothing in the cache"
            )
        return Judgement("no", difference, f"the whole interval of the difference lies within ± {effect}")
    if difference.high < -minimal_effect:
        return Judgement("undecided", difference, f"sinks cost more than {effect} here: the window they take is worth more")
    return Judgement("undecided", difference, f"the interval of the difference reaches across {effect} or -{effect}")


def effective_length(curves: Mapping[str, Sequence[tuple[int, np.ndarray]]], *, chance: float) -> dict[str, int | None]:
    """For each policy the largest place on its curve up to which the mean score is above half way from chance to the best.

    Args:
        curves: policy to (place, one number an item), places ascending.

    Returns:
        0 for a policy that is below at the first place already; ``None`` for all if none is above chance anywhere: the smallest
        probability of its best mean being chance, by the interval of :func:`mean_over_items` at 99 %, decides.
    """
    means = {policy: [(distance, float(np.mean(values))) for distance, values in curve] for policy, curve in curves.items()}
    best = max((values for curve in curves.values() for _, values in curve), key=lambda values: float(np.mean(values)))
    if mean_over_items(best, level=0.99, scale=1.0).low <= chance:
        return dict.fromkeys(curves)
    threshold = chance + 0.5 * (float(np.mean(best)) - chance)
    return {policy: _last(curve, threshold) for policy, curve in means.items()}


def useful_context(curve: Sequence[tuple[int, np.ndarray]]) -> int:
    """The longest context that was of use: each one up to it raised the score over the one before.

    A longer context is of use if the paired gain is :data:`MINIMAL_GAIN` or more on average and its 95 % interval is above 0.

    Args:
        curve: (tokens of context, one score an item, larger is better), contexts ascending.
    """
    highest = curve[0][0]
    for (_, before), (context, after) in pairwise(curve):
        gain = mean_over_items(after - before)
        if gain.mean < MINIMAL_GAIN or gain.low <= 0.0:
            break
        highest = context
    return highest


def _mean(interval: Interval) -> float:
    return interval.mean


def _last(curve: Sequence[tuple[int, float]], threshold: float) -> int:
    last = 0
    for distance, mean in curve:
        if mean < threshold:
            break
        last = distance
    return last
