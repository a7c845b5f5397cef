"""What the effects of several seeds say together: a middle and an interval, by the rule that suits the kind of effect.

Student's t suits means of numbers that scatter. It does not suit a ratio, whose errors are relative; nor a rate near its end,
where the interval would go below 0; nor a count of trainings in which something happened, where 0 of 3 has no spread and yet an
interval from 0 to 0.71; nor a rank correlation over a few conditions, which takes a handful of values; nor numbers that are all
alike, which show no spread to take an interval from.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from sinklab.results.intervals import mean_interval
from sinklab.results.metric import FRACTION, PERCENTAGE, Metric, declared

if TYPE_CHECKING:
    import numpy as np

Method = Literal[
    "Student's t",
    "Student's t of logarithms",
    "Student's t on the arcsine scale",
    "exact, of counts",
    "exact, of the median",
    "range",
]

_Numbers = TypeVar("_Numbers", float, "np.ndarray")

LEAST_FOR_A_MEDIAN = 6
"""Fewest values between whose extremes the median of a population lies in 95 % of draws: all miss it with a chance of 2**-5."""


DIVERGED = Metric(
    "diverged", "fraction", "1 for a training that diverged, else 0; of several the share.", outcome=True, range=FRACTION
)

SEEDS = 3
"""Fewest seeds with which an interval or a verdict is given."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A middle with its interval.

    Attributes:
        middle: mean, geometric mean, share or median, as the method says.
        interval: both ends; ``None`` where the values show no spread and are too few for an interval that needs none.
        method: how the interval was taken.
        standardized: the middle over the standard deviation over seeds; ``None`` where that is 0 or means nothing.
    """

    middle: float
    interval: tuple[float, float] | None
    method: Method
    standardized: float | None = None


def estimate_metric(name: str, values: Sequence[float], level: float = 0.95) -> Estimate:
    """What values of a metric, of three seeds or more, say together by its declaration; declared nowhere, that of a mean.

    Outcomes are counted. A number that is a ratio (a norm over that of others) is one. Rates are what is declared to lie from 0
    to the whole, and not what the values at hand happen to.
    """
    metric = declared(name)
    if metric is None:
        return estimate_mean(values, level)
    return estimate_kind(values, level, unit=metric.unit, range=metric.range, outcome=metric.outcome)


def estimate_kind(
    values: Sequence[float], level: float, *, unit: str, range: tuple[float, float], outcome: bool, paired: bool = False
) -> Estimate:
    """The same by the kind of number; ``paired`` values are differences of two numbers of one seed."""
    if outcome and all(value in (-1.0, 0.0, 1.0) for value in values):
        return estimate_counts(values, level, paired=paired)
    if unit == "ratio" and not paired:
        return estimate_ratio(values, level)
    if range in (FRACTION, PERCENTAGE):
        least, whole = range
        # In it but for rounding, which a root of the share does not bear.
        return estimate_share([min(max(value, least), whole) for value in values], whole, level)
    return estimate_mean(values, level)


def estimate_mean(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean and Student's t interval of two or more; of values all alike the interval of their median, if there are enough."""
    spread = statistics.stdev(values)
    if not spread:
        return estimate_median(values, level)
    middle, half = mean_interval(values, level)
    return Estimate(middle, (middle - half, middle + half), "Student's t", middle / spread)


def estimate_ratio(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Geometric mean of two or more, with the t interval of the logarithms: half and double are equally far from 1.

    Values of which one is not above 0 are taken as they are.
    """
    if min(values) <= 0:
        return estimate_mean(values, level)
    logs = estimate_mean([math.log(value) for value in values], level)
    interval = None if logs.interval is None else (math.exp(logs.interval[0]), math.exp(logs.interval[1]))
    method: Method = "Student's t of logarithms" if logs.method == "Student's t" else logs.method
    return Estimate(math.exp(logs.middle), interval, method, logs.standardized)


def estimate_share(values: Sequence[float], whole: float, level: float = 0.95) -> Estimate:
    """Mean of rates from 0 to ``whole`` (1, or 100 for percent), two or more, with a t interval of that mean, symmetric in the
    arcsine of its root and between the ends.

    The standard error is that of the mean, carried over by the slope of the arcsine there. The mean of the arcsines of single
    rates is another number, and a smaller one where some trainings have a sink and others none: of rates that are near 0 in
    seven of ten trainings and 25 % in the others, its interval from eight trainings lies below their mean in 24 % of draws,
    this one in 6 %.
    """
    plain = estimate_mean(values, level)
    if plain.method != "Student's t" or plain.interval is None:
        return plain
    if not 0.0 < plain.middle < whole:  # they differ from the end by less than their mean can tell
        return estimate_median(values, level)
    half = on_arcsine_scale((plain.interval[1] - plain.interval[0]) / 2, plain.middle, whole)
    angle = math.asin(math.sqrt(plain.middle / whole))
    low, high = (whole * math.sin(min(max(end, 0.0), math.pi / 2)) ** 2 for end in (angle - half, angle + half))
    return Estimate(plain.middle, (low, high), "Student's t on the arcsine scale", plain.standardized)


def on_arcsine_scale(half: _Numbers, middle: _Numbers, whole: float) -> _Numbers:
    """Half the width of an interval of a rate (in the unit of ``whole``), as an angle: the slope of the arcsine of the root
    is that at the middle, which is at neither end."""
    share = middle / whole
    return half / whole / (2 * (share * (1 - share)) ** 0.5)


def estimate_counts(values: Sequence[float], level: float = 0.95, *, paired: bool = False) -> Estimate:
    """Share of the seeds with 1, less that with -1 where ``paired``, and an interval that holds its level for any number of
    seeds.

    Of values 0 and 1 it is that of Clopper and Pearson (1934, doi 10.1093/biomet/26.4.404). Of differences of two such numbers
    of one seed it comes from those of the shares of 1 and of -1, each at the level with which both hold together (Bonferroni).
    """
    count, ones, minus = len(values), sum(value == 1 for value in values), sum(value == -1 for value in values)
    middle = (ones - minus) / count
    if not paired:
        return Estimate(middle, _clopper_pearson(ones, count, level), "exact, of counts")
    each = 1 - (1 - level) / 2
    (low_of_ones, high_of_ones), (low_of_minus, high_of_minus) = (_clopper_pearson(of, count, each) for of in (ones, minus))
    return Estimate(middle, (low_of_ones - high_of_minus, high_of_ones - low_of_minus), "exact, of counts")


def estimate_median(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Median, and the two values between which that of the population lies with at least the level, whatever its distribution.

    There is an interval from :data:`LEAST_FOR_A_MEDIAN` values on, at 95 %.
    """
    import scipy.special

    ordered, count = sorted(values), len(values)
    # Fewer than `inside` of them on one side of the population's median has a chance of at most half of what is left.
    inside = sum(float(scipy.special.bdtr(below, count, 0.5)) <= (1 - level) / 2 for below in range((count + 1) // 2))
    interval = (ordered[inside - 1], ordered[count - inside]) if inside else None
    return Estimate(statistics.median(ordered), interval, "exact, of the median")


def _clopper_pearson(successes: int, count: int, level: float) -> tuple[float, float]:
    import scipy.special

    tail = (1 - level) / 2
    low = 0.0 if not successes else float(scipy.special.betaincinv(successes, count - successes + 1, tail))
    high = 1.0 if successes == count else float(scipy.special.betaincinv(successes + 1, count - successes, 1 - tail))
    return low, high
