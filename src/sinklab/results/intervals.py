"""Statistics of few numbers: intervals of means and shares, what their absence leaves open, and ties but for rounding."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from sinklab.errors import ConfigurationError

LEVEL = 0.95
"""Confidence level of intervals where no other is given."""

MOST = 0.5
"""Share of the sinks at a position above which the commonest token there says what the place is."""

LEAST_SHARE = 0.1
"""Share of documents that the interval of a sinking head must exceed: less often than in one of ten, it reads that text."""

RESAMPLES = 10_000
LEAST_RESAMPLED = 8
"""Items from which on means are resampled: of fewer, 95 % intervals of normal numbers hold the mean in 92 to 94 %."""
ROWS = 64
"""Numbers that are resampled at once; what bounds the memory."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over items and where the population's mean is likely to be, in the unit of the values."""

    mean: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return dataclasses.asdict(self)


def mean_over_items(
    values: Sequence[float] | np.ndarray, *, level: float = LEVEL, scale: float | None = None, paired: bool = False
) -> Interval:
    """Mean of one number an item, with its bootstrap interval.

    The percentile interval is too short for few items by the factor ``sqrt(n / (n - 1))`` and by Student's t against the normal
    distribution; its percentiles are moved outwards by both (Hesterberg 2015, arXiv 1411.5279, "expanded percentile interval").
    Up to seven items, and where the percentile is rarer than one of all resamples (up to eight items at 99 %), the interval is
    Student's. Paired differences of two policies are such numbers too.

    Args:
        values: two or more independent items.
        scale: how far one item could change, for bounded scores. If all values are the same, resampling shows no spread at
            all; the interval is then ``3 / n`` of this scale to both sides, since n items without an exception leave 3 / n
            for its rate.
        paired: whether the values are differences of two bounded scores. If most are 0 and none is below (or above), resampling
            shows none either; ``3 / n`` is then joined to that side of the interval as a second, independent error
            (Newcombe 1998, doi 10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I).

    Raises:
        ConfigurationError: fewer than two values.
    """
    return means_over_items(np.asarray(values, dtype=np.float64)[None], level=level, scale=scale, paired=paired)[0]


def means_over_items(
    values: np.ndarray, *, level: float = LEVEL, scale: float | None = None, paired: bool = False
) -> list[Interval]:
    """:func:`mean_over_items` of many numbers an item, which are resampled together.

    Args:
        values: ``(numbers, items)``.
    """
    values = np.asarray(values, dtype=np.float64)
    count = values.shape[1]
    means = values.mean(axis=1)
    shares, tail = _resampled(count, level)
    intervals = []
    for start in range(0, len(values), ROWS):
        rows = values[start : start + ROWS]
        if _too_few(count, tail):
            lows, highs = _student(rows, lambda means: means, level)
        else:
            lows, highs = np.quantile(rows @ shares.T, [tail, 1.0 - tail], axis=1)
        for row, mean, low, high in zip(rows, means[start : start + ROWS], lows, highs, strict=True):
            margin = 0.0 if scale is None else scale * 3.0 / count
            if np.ptp(row) < 1e-12:
                low, high = mean - margin, mean + margin
            elif paired and np.mean(row == 0) > 0.5:
                low = low if row.min() < 0 else mean - math.hypot(mean - low, margin)
                high = high if row.max() > 0 else mean + math.hypot(high - mean, margin)
            intervals.append(Interval(float(mean), float(low), float(high)))
    return intervals


def function_over_items(values: np.ndarray, function: Callable[[np.ndarray], np.ndarray], *, level: float = LEVEL) -> Interval:
    """A function of several means over the same items, such as their ratio, with its bootstrap interval.

    Items are resampled with all their numbers together, and the interval is widened as that of :func:`mean_over_items`; for as
    few items as there it is Student's, with the standard error of the jackknife.

    Args:
        values: ``(numbers, items)``.
        function: takes means ``(numbers, …)`` and gives ``(…)``.

    Raises:
        ConfigurationError: fewer than two items.
    """
    values = np.asarray(values, dtype=np.float64)
    shares, tail = _resampled(values.shape[1], level)
    if _too_few(values.shape[1], tail):
        low, high = _student(values, function, level)
    else:
        low, high = np.quantile(function(values @ shares.T), [tail, 1.0 - tail])
    return Interval(float(function(values.mean(axis=1))), float(low), float(high))


def _resampled(count: int, level: float) -> tuple[np.ndarray, float]:
    """How often each item is drawn, as shares ``(RESAMPLES, items)``, and the share of resamples behind either end."""
    import scipy.special

    if count < 2:
        raise ConfigurationError(f"an interval needs two items or more, got {count}; take more of them")
    outwards = math.sqrt(count / (count - 1)) * scipy.special.stdtrit(count - 1, (1 + level) / 2)
    chosen = np.random.default_rng(0).integers(count, size=(RESAMPLES, count)) + count * np.arange(RESAMPLES)[:, None]
    shares = np.bincount(chosen.ravel(), minlength=RESAMPLES * count).reshape(RESAMPLES, count) / count
    return shares, float(scipy.special.ndtr(-outwards))


def _too_few(count: int, tail: float) -> bool:
    """Whether resampling shows too little: too few items, or a percentile that is rarer than one of all resamples."""
    return count < LEAST_RESAMPLED or tail < 1 / RESAMPLES


def _student(values: np.ndarray, function: Callable[[np.ndarray], np.ndarray], level: float) -> tuple[np.ndarray, np.ndarray]:
    """Ends of Student's interval of a function of means, with the jackknife's error, which for a mean is its standard error."""
    import scipy.special

    count = values.shape[1]
    without = function((values.sum(axis=1, keepdims=True) - values) / (count - 1))  # (…, items): each left out in turn
    error = without.std(axis=-1) * math.sqrt(count - 1)
    half = error * scipy.special.stdtrit(count - 1, (1 + level) / 2)
    middle = function(values.mean(axis=1))
    return middle - half, middle + half


@functools.cache
def least_count_above(share: float, cases: int, *, level: float = LEVEL) -> int:
    """The least number of cases that puts the whole interval of a share above some share.

    Wilson's score interval, which holds its level for few cases and shares near 0 and 1 (Brown, Cai and DasGupta 2001,
    doi 10.1214/ss/1009213286).

    Args:
        share: in (0, 1).
        cases: how many there are, all together.

    Returns:
        ``cases + 1`` if even all of them would not.
    """
    import scipy.special

    squared = float(scipy.special.ndtri((1 + level) / 2)) ** 2

    def low(count: int) -> float:
        if not count:
            return 0.0
        spread = math.sqrt(squared * (4 * count * (cases - count) / cases + squared))
        return (2 * count + squared - spread) / (2 * (cases + squared))

    return bisect.bisect_right(range(cases + 1), share, key=low) if cases else 1


LEAST_PARTS = 8
"""Parts of the text that an interval rests on at least; Student's t for 7 degrees of freedom is 2.4, for infinitely many 2."""


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Mean of independent values and half the width of Student's t interval around it, in the unit of the values.

    Args:
        values: two or more; with two the interval is that of one degree of freedom, and wide.
        level: probability with which such intervals hold the mean of the population, if values are normal.
    """
    import scipy.special  # of the same functions as scipy.stats, which takes half a second to import

    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(scipy.special.stdtrit(len(values) - 1, (1 + level) / 2)) * error


def rare_cost(count: int, what: str = "text") -> str:
    """How rare a cost may be that none of so many texts shows: the sentence that stands beside a verdict "no" over their means.

    What one text in r has is in none of n with probability ``(1 - 1/r)^n``, which is 5 % at ``r = n / 3`` (the rule of three),
    and of two or three texts at a share of 78 or 63 %.
    An interval of means says nothing of it: texts without it have no spread.

    Args:
        count: texts that were measured, 1 or more.
        what: the noun for one of them.
    """
    if count == 1:
        return f"One {what} was measured: a cost that others have is not seen."
    if count < 4:  # more than half of them may have it, so the exact share
        share = 100 * (1 - 0.05 ** (1 / count))
        return f"A cost in fewer than {share:.0f} % of {what}s may not show in these {count}."
    return f"A cost in fewer than one {what} in {max(2, count // 3):,} may not show in these {count:,}."


TIE = 1e-5
"""Relative distance within which two float32 weights are the same: the noise of two kernels that compute one number."""


def just_above(threshold: float) -> float:
    """What a mean weight exceeds that lies above a threshold, and is not as large but for rounding.

    Ten weights of 1/10 add up to a little more than 1 in float32, and their mean is not above 1/10.
    """
    return threshold * (1.0 + TIE)


def require_threshold(threshold: object, name: str = "threshold") -> None:
    """Refuse a threshold that is no number in [0, 1)."""
    try:
        fits, where = bool(0.0 <= threshold < 1.0), "in"  # type: ignore[operator]
    except TypeError:
        fits, where = False, "a number in"
    if not fits:
        raise ConfigurationError(
            f"{name} {threshold!r} must be {where} [0, 1): a mean weight is compared with it; usual is 0.3"
        )
