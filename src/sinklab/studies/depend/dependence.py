"""The index of dependence: how much of what a score has above knowing nothing goes when the sink is hidden."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from sinklab.results.intervals import Interval, function_over_items, mean_over_items
from sinklab.results.metric import Metric

__all__ = ["SCORE_LOST", "SINK_DEPENDENCE", "Dependence", "measure_dependence"]

SINK_DEPENDENCE = Metric(
    "sink_dependence",
    "ratio",
    "(V - H) / (max(V, H) - F) of mean scores with the sink visible (V), hidden (H), and without context (F): chance, or that "
    "of one token in the cache; V and H below F count as F, and there is no index where neither is above F.",
    range=(-1.0, 1.0),
)
SCORE_LOST = Metric(
    "score_lost",
    "ratio",
    "As sink_dependence, of a condition (H) against the reference with the sink visible (V).",
    range=(-1.0, 1.0),
)


@dataclasses.dataclass(frozen=True)
class Dependence:
    """An index of dependence.

    Attributes:
        index: from -1 (the whole score needs the change) to 1 (the change takes all of it); ``None`` if the score says
            nothing.
        reason: why there is none.
    """

    index: Interval | None
    reason: str = ""


def measure_dependence(
    visible: np.ndarray,
    hidden: np.ndarray,
    floor: np.ndarray,
    *,
    chance: float | None,
    scale: float | None,
    level: float = 0.95,
) -> Dependence:
    """The index of one score, :data:`SINK_DEPENDENCE`, with its interval.

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
        return Dependence(None, worse if chance is None else "at chance: says nothing about sinks")
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
    return Dependence(index)


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
