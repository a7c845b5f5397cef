"""The judge: whether a score depends on the sink tokens, how much of it, and how long a context is of use under a policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from sinklab.results.intervals import Interval, function_over_items, mean_over_items

__all__ = ["Judgement", "Verdict", "effective_length", "judge", "measure_dependence", "useful_context"]

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


def measure_dependence(
    visible: np.ndarray,
    hidden: np.ndarray,
    floor: np.ndarray,
    *,
    chance: float | None,
    scale: float | None,
    level: float = 0.95,
) -> Interval | str:
    """The index of dependence with its interval, or why there is none: the share of a score that goes when the sink is hidden.

    ``(V - H) / (max(V, H) - F)`` of mean scores with the sink visible (V), hidden (H), and without context (F); from -1 to 1.
    Items are resampled, visible, hidden and floor of an item together, and the ratio is that of the means: a mean of ratios of
    single items would be ruled by those that are near the floor. Where most items do not change and none changes one way, the
    interval leaves room for that way, as that of the difference does (:func:`~sinklab.results.intervals.mean_over_items`).

    Args:
        visible, hidden, floor: one number for each item, the same items in the same order; the floor is a policy that keeps
            one token.
        chance: value of a model that knows nothing, or ``None``; then the floor is what needs no context.
        scale: how far one item could change, for scores in a fixed range.
    """
    least = floor if chance is None else np.full(len(visible), chance)
    best = visible if visible.mean() >= hidden.mean() else hidden
    # The better of two is looked at, so each interval leaves out half as much, as in the judge.
    above = mean_over_items(best - least, level=(1 + level) / 2, scale=scale)
    if above.low <= 0.0:
        # Without a chance level the score may gain by the sink all the same: what is not known is a share of what.
        worse = "not shown to be better than with one token in the cache: no share of it can be given"
        return worse if chance is None else "at chance: says nothing about sinks"
    index = function_over_items(np.stack([visible, hidden, least]), _share, level=level)
    change, room = visible - hidden, float((best - least).mean())
    if np.ptp(change) < 1e-12:  # no spread to resample: the rule of three, as for the difference itself
        difference = mean_over_items(change, level=level, scale=scale, paired=True)
        index = _bounded(index.mean, difference.low / room, difference.high / room)
    elif scale is not None and np.mean(change == 0) > 0.5:  # and as there where none of few changes goes the other way
        margin = 3.0 * scale / len(change) / room
        low = index.low if change.min() < 0 else index.mean - math.hypot(index.mean - index.low, margin)
        high = index.high if change.max() > 0 else index.mean + math.hypot(index.high - index.mean, margin)
        index = _bounded(index.mean, low, high)
    return index


def _bounded(mean: float, low: float, high: float) -> Interval:
    """The interval of an index, within its range."""
    return Interval(mean, max(-1.0, min(1.0, low)), max(-1.0, min(1.0, high)))


def _share(means: np.ndarray) -> np.ndarray:
    """The index of mean scores ``(3, …)``: visible, hidden, least."""
    visible, hidden, least = means
    gains = np.maximum(visible, least) - least, np.maximum(hidden, least) - least
    room = np.maximum(*gains)
    result: np.ndarray = np.divide(gains[0] - gains[1], room, out=np.zeros_like(room), where=room > 0.0)
    return result


Curve = Sequence[tuple[int, np.ndarray]]
"""Places on the task's axis, ascending, each with one number an item."""


def effective_length(curves: Mapping[str, Curve], *, chance: float) -> dict[str, int | None]:
    """For each policy the largest place on its curve up to which the mean score is above half way from chance to the best.

    Returns:
        0 for a policy that is below at the first place already; ``None`` for all if none is above chance anywhere: the smallest
        probability of its best mean being chance, by the interval of :func:`mean_over_items` at 99 %, decides.
    """
    best = max((values for curve in curves.values() for _, values in curve), key=lambda values: float(np.mean(values)))
    if mean_over_items(best, level=0.99, scale=1.0).low <= chance:
        return dict.fromkeys(curves)
    threshold = chance + 0.5 * (float(np.mean(best)) - chance)
    lengths: dict[str, int | None] = {}
    for policy, curve in curves.items():
        below = next((index for index, (_, values) in enumerate(curve) if float(np.mean(values)) < threshold), len(curve))
        lengths[policy] = curve[below - 1][0] if below else 0
    return lengths


def useful_context(curve: Curve) -> int:
    """The longest context that was of use: each one up to it raised the score over the one before.

    A longer context is of use if the paired gain is :data:`MINIMAL_GAIN` or more on average and its 95 % interval is above 0.
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
