"""How many seeds would decide what is open: the count at which the interval clears the bound with a chance of four in five.

A count at which it would clear the bound *if the middle and the spread stayed as they are* is a coin's toss even then, and with
three seeds both are hardly known. So the forecast is over all middles and spreads that the seeds leave possible, and over what
later seeds may add (Spiegelhalter et al. 1986, doi 10.1016/0197-2456(86)90003-6), under normal scatter with the reference prior
on the scale on which the interval was taken (:mod:`sinklab.jobs.estimate`); of counts, with the prior of Jeffreys.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from sinklab.jobs.estimate import LEAST_FOR_A_MEDIAN, SEEDS, estimate_counts, on_arcsine_scale
from sinklab.results.intervals import CHANCE, fewest
from sinklab_claims.verdict.records import PartFound

__all__ = ["MOST", "needed_seeds"]

MOST = 1000
"""Seeds beyond which nothing is foretold: the middle is as good as on the bound."""

ROUNDING = 1e-9
"""Of an interval that was kept; those of differences and of the same numbers alone lie farther apart."""

DRAWS = 4096
"""Of what may be true and may come, always the same ones; the chance is known to 0.006."""


def needed_seeds(part: PartFound) -> int | None:
    """Seeds, those that are there among them, that decide a part on whichever side, with the chance of a forecast.

    Args:
        part: as in a record; one whose verdict is "inconclusive".

    Returns:
        More than there are, up to :data:`MOST`; ``None`` where no count within it would do, or none can be foretold: there is
        no number, or an interval of order statistics reaches over the bound.
    """
    values = [value for value in part.by_seed.values() if value is not None]
    if not values or part.model:  # any model that comes may be the one that is said to exist
        return None
    if len(values) < SEEDS:
        return SEEDS
    if part.interval is None:
        return LEAST_FOR_A_MEDIAN if len(values) < LEAST_FOR_A_MEDIAN else None
    method, level = part.method, 1 - 0.05 / part.steps
    if method == "exact, of counts":
        return _of_counts(part, values, level)
    if method == "Student's t of logarithms":
        bounds = [math.log(bound) for bound in _finite_bounds(part) if bound > 0]  # no ratio passes one at 0 or below
        return _of_t([math.log(value) for value in values], bounds, _apart, level)
    if method == "Student's t on the arcsine scale":
        whole = 100.0 if part.unit == "percent" else 1.0
        bounds = [bound for bound in _finite_bounds(part) if 0 <= bound <= whole]
        return _of_t(values, bounds, functools.partial(_apart_in_angle, whole=whole), level)
    return _of_t(values, _finite_bounds(part), _apart, level) if method == "Student's t" else None


def _bounds(part: PartFound) -> tuple[float, float]:
    low, high = part.more_than, part.less_than
    return -math.inf if low is None else low, math.inf if high is None else high


def _finite_bounds(part: PartFound) -> list[float]:
    return [bound for bound in _bounds(part) if math.isfinite(bound)]


_Clears = Callable[[np.ndarray, np.ndarray, float], np.ndarray]
"""Whether intervals reach no bound, from their middles and half widths ``(DRAWS,)`` and the bound."""


def _apart(middle: np.ndarray, half: np.ndarray, bound: float) -> np.ndarray:
    return np.abs(middle - bound) > half


def _apart_in_angle(middle: np.ndarray, half: np.ndarray, bound: float, *, whole: float) -> np.ndarray:
    """The same of a rate, whose interval is taken on the scale of angles; a middle that no rate has is moved to the end."""
    share = np.clip(middle / whole, 1e-6, 1 - 1e-6)
    return np.abs(np.arcsin(np.sqrt(share)) - math.asin(math.sqrt(bound / whole))) > on_arcsine_scale(
        half, share * whole, whole
    )


def _of_t(values: Sequence[float], bounds: Sequence[float], clears: _Clears, level: float) -> int | None:
    """Seeds with which Student's t interval at the level reaches no bound."""
    import scipy.special

    seen, middle, squares = len(values), statistics.fmean(values), statistics.variance(values) * (len(values) - 1)
    generator = np.random.default_rng(0)
    true_spread = np.sqrt(squares / generator.chisquare(seen - 1, DRAWS))
    true_middle = middle + true_spread / math.sqrt(seen) * generator.standard_normal(DRAWS)
    of_middle, of_spread = generator.standard_normal(DRAWS), generator.uniform(size=DRAWS)

    def decides(count: int) -> bool:
        more = count - seen
        later = true_middle + true_spread / math.sqrt(more) * of_middle
        later_squares = true_spread**2 * (scipy.special.chdtri(more - 1, of_spread) if more > 1 else 0.0)
        of_all = (seen * middle + more * later) / count
        spread = np.sqrt((squares + later_squares + seen * more / count * (later - middle) ** 2) / (count - 1))
        half = scipy.special.stdtrit(count - 1, (1 + level) / 2) * spread / math.sqrt(count)
        return bool(np.all([clears(of_all, half, bound) for bound in bounds], 0).mean() >= CHANCE)

    return fewest(decides, seen + 1, MOST)


def _of_counts(part: PartFound, values: Sequence[float], level: float) -> int | None:
    """Seeds with which the exact interval at the level reaches no bound."""
    low, high = _bounds(part)
    # Of differences it is wider than of numbers that happen to be the same, since no -1 was seen and some may come.
    alone = estimate_counts(values, level).interval
    paired = alone is not None and part.interval is not None and part.interval[0] < alone[0] - ROUNDING
    counts = [sum(value == kind for value in values) for kind in (1, -1, 0)]
    kinds = [0, 1, 2] if paired else [0, 2]  # unpaired, there is no -1
    generator = np.random.default_rng(0)
    shares = generator.dirichlet([counts[kind] + 0.5 for kind in kinds], DRAWS)

    @functools.cache
    def decided(ones: int, minus: int, count: int) -> bool:
        alike = [1.0] * ones + [-1.0] * minus + [0.0] * (count - ones - minus)
        interval = estimate_counts(alike, level, paired=paired).interval
        assert interval is not None, "that of counts is always there"
        return (low < interval[0] and interval[1] < high) or interval[1] <= low or interval[0] >= high

    def decides(count: int) -> bool:
        later = np.zeros((DRAWS, 3), int)
        later[:, kinds] = np.random.default_rng(1).multinomial(count - len(values), shares)
        cases, often = np.unique(later + counts, axis=0, return_counts=True)
        return sum(often[row] for row, case in enumerate(cases) if decided(*map(int, case[:2]), count)) >= CHANCE * DRAWS

    return fewest(decides, len(values) + 1, MOST)
