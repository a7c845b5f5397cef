"""How many seeds would decide what is open: the count at which the interval clears the bound, if seeds go on to scatter so.

It is a forecast from what is there and no promise: with three seeds the spread is known to a factor of three. It is made on the
scale on which the interval was taken (:mod:`sinklab.jobs.estimate`), with the middle and the spread that the seeds have shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from sinklab.jobs.estimate import LEAST_FOR_A_MEDIAN, estimate_counts
from sinklab.jobs.verdict import SEEDS
from sinklab.results.summaries import ClaimPart

__all__ = ["MOST", "leans_inside", "needed_seeds"]

MOST = 1000
"""Seeds beyond which nothing is foretold: the middle is as good as on the bound."""


def leans_inside(part: ClaimPart) -> bool:
    """Whether the middle of a part lies in the region that is claimed."""
    low, high = _bounds(part)
    return part["mean"] is not None and low < part["mean"] < high


def needed_seeds(part: ClaimPart) -> int | None:
    """Fewest seeds, those that are there among them, that would decide a part.

    Args:
        part: as in a record; one whose verdict is "inconclusive".

    Returns:
        More than there are, up to :data:`MOST`; ``None`` where no count within it would do, or none can be foretold: there is
        no number, the middle lies on a bound, or an interval of order statistics reaches over it.
    """
    values = [value for value in part["by_seed"].values() if value is not None]
    if not values:
        return None
    if len(values) < SEEDS:
        return SEEDS
    if part["interval"] is None:
        return LEAST_FOR_A_MEDIAN if len(values) < LEAST_FOR_A_MEDIAN else None
    method = part.get("method")
    if method == "exact, of counts":
        return _of_counts(part, values)
    if method == "Student's t of logarithms":
        return _of_t(part, values, math.log, least=math.ulp(0.0))  # no ratio passes a bound at 0 or below
    if method == "Student's t of arcsines":
        whole = 100.0 if part["unit"] == "percent" else 1.0
        return _of_t(part, values, lambda value: math.asin(math.sqrt(value / whole)), least=0.0, most=whole)
    return _of_t(part, values, float) if method == "Student's t" else None


def _bounds(part: ClaimPart) -> tuple[float, float]:
    low, high = part["more_than"], part["less_than"]
    return -math.inf if low is None else low, math.inf if high is None else high


def _of_t(
    part: ClaimPart,
    values: Sequence[float],
    scale: Callable[[float], float],
    least: float = -math.inf,
    most: float = math.inf,
) -> int | None:
    """Fewest seeds with which Student's t interval, on its scale, reaches no bound; bounds off the scale are never reached."""
    import scipy.special

    there = [scale(value) for value in values]
    middle, spread = statistics.fmean(there), statistics.stdev(there)
    bounds = [scale(bound) for bound in _bounds(part) if math.isfinite(bound) and least <= bound <= most]
    room = min((abs(middle - bound) for bound in bounds), default=math.inf)

    def decides(count: int) -> bool:
        return float(scipy.special.stdtrit(count - 1, 0.975)) * spread / math.sqrt(count) < room

    return _fewest(decides, len(values) + 1)


def _of_counts(part: ClaimPart, values: Sequence[float]) -> int | None:
    """Fewest seeds with which the exact interval reaches no bound, where the shares stay as they are."""
    low, high = _bounds(part)
    paired = part["interval"] is not None and part["interval"][0] < 0
    ones, minus = (sum(value == sign for value in values) / len(values) for sign in (1, -1))

    def decides(count: int) -> bool:
        happened, other = round(ones * count), round(minus * count)
        alike = [1.0] * happened + [-1.0] * other + [0.0] * (count - happened - other)
        interval = estimate_counts(alike, paired=paired).interval
        assert interval is not None, "that of counts is always there"
        return (low < interval[0] and interval[1] < high) or interval[1] <= low or interval[0] >= high

    return _fewest(decides, len(values) + 1)


def _fewest(decides: Callable[[int], bool], least: int) -> int | None:
    """The first count of seeds that decides; a range is halved, as more seeds of one kind never undo it."""
    if least > MOST or not decides(MOST):
        return None
    most = MOST
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if decides(middle) else (middle + 1, most)
    return most
