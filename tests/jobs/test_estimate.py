"""Intervals over seeds: known values, what they hold under simulation, and the identities of each rule."""

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from sinklab.jobs.estimate import (
    LEAST_FOR_A_MEDIAN,
    estimate_counts,
    estimate_mean,
    estimate_median,
    estimate_ratio,
    estimate_share,
)


@pytest.mark.parametrize("count", [3, 5, 8, 20])
def test_counts_are_those_of_clopper_and_pearson(count):
    for ones in range(count + 1):
        found = estimate_counts([1.0] * ones + [0.0] * (count - ones))
        expected = stats.binomtest(ones, count).proportion_ci(method="exact")
        assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-12)
        assert found.middle == ones / count


def test_differences_of_counts_are_symmetric_and_hold_their_level():
    """Of 1, 0 and -1 with the chances 0.3, 0.5 and 0.2: at least 95 % of intervals hold 0.1, whatever the number of seeds."""
    random = np.random.default_rng(0)
    for count in (3, 8, 20):
        drawn = random.choice([1.0, 0.0, -1.0], p=[0.3, 0.5, 0.2], size=(2000, count))
        intervals = [estimate_counts(row.tolist(), paired=True).interval for row in drawn]
        assert np.mean([low <= 0.1 <= high for low, high in intervals]) >= 0.95
    low, high = estimate_counts([1.0, -1.0, -1.0], paired=True).interval
    assert estimate_counts([-1.0, 1.0, 1.0], paired=True).interval == pytest.approx((-high, -low))


def test_a_median_holds_its_level_for_any_distribution():
    """Five sigma of 4,000 draws are 1.7 points: from 6 values on, and of a skewed distribution too."""
    random = np.random.default_rng(1)
    for count in (6, 8, 9, 13):
        for drawn, median in ((random.exponential(size=(4000, count)), math.log(2)), (random.normal(size=(4000, count)), 0.0)):
            held = [low <= median <= high for low, high in (estimate_median(row.tolist()).interval for row in drawn)]
            assert np.mean(held) >= 0.95 - 0.017
    assert estimate_median([1.0] * (LEAST_FOR_A_MEDIAN - 1)).interval is None
    assert estimate_median([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]).interval == (1.0, 6.0)
    assert estimate_median([float(value) for value in range(9)]).interval == (1.0, 7.0)


def test_a_mean_is_students_and_alike_values_have_none():
    found = estimate_mean([9.0, 10.0, 11.0])
    expected = stats.t.interval(0.95, 2, loc=10.0, scale=stats.sem([9.0, 10.0, 11.0]))
    assert found.interval == pytest.approx(expected)
    assert found.standardized == 10.0
    assert estimate_mean([2.0, 2.0, 2.0]).interval is None
    assert estimate_mean([2.0] * 8).interval == (2.0, 2.0)


def test_a_ratio_is_the_same_upside_down():
    values = [0.5, 0.7, 2.0, 1.1]
    found, turned = estimate_ratio(values), estimate_ratio([1 / value for value in values])
    assert found.middle == pytest.approx(1 / turned.middle) == pytest.approx(stats.gmean(values))
    assert found.interval == pytest.approx((1 / turned.interval[1], 1 / turned.interval[0]))
    assert estimate_ratio([-1.0, 1.0, 2.0]).method == "Student's t"


def test_a_share_is_the_same_seen_from_the_other_end():
    values = [0.5, 3.0, 36.0]
    found, other = estimate_share(values, 100.0), estimate_share([100 - value for value in values], 100.0)
    assert found.interval == pytest.approx((100 - other.interval[1], 100 - other.interval[0]))
    assert estimate_share([value / 100 for value in values], 1.0).interval == pytest.approx(
        tuple(end / 100 for end in found.interval)
    )
    assert estimate_share([0.0, 0.0, 0.0], 100.0).interval is None


@pytest.mark.parametrize("whole", [1.0, 100.0])
def test_shares_at_the_end_that_differ_by_rounding_alone_are_alike(whole):
    values = [whole, whole, math.nextafter(whole, 0.0)]
    assert statistics.fmean(values) == whole
    assert estimate_share(values, whole).interval is None
    assert estimate_share([whole] * 4 + values[1:], whole).interval == (values[-1], whole)


def test_the_interval_of_a_share_is_around_its_mean_and_that_of_t_where_the_scatter_is_small():
    found = estimate_share([49.0, 50.0, 51.0], 100.0)
    assert found.interval == pytest.approx(stats.t.interval(0.95, 2, loc=50, scale=1 / math.sqrt(3)), rel=1e-3)
    # Half the angle between the ends is the t interval's half width over the slope at the mean: 2 sqrt(0.04 * 0.96).
    values = [0.0, 1.0, 2.0, 13.0]
    angles = [math.asin(math.sqrt(end / 100)) for end in estimate_share(values, 100.0).interval]
    half = stats.t.ppf(0.975, 3) * statistics.stdev(values) / 2 / 100
    assert angles[0] == 0 < 0.04 == statistics.fmean(values) / 100
    assert angles[1] - math.asin(math.sqrt(0.04)) == pytest.approx(half / (2 * math.sqrt(0.04 * 0.96)))


@pytest.mark.parametrize("count", [6, 8, 16])
def test_the_mean_of_rates_that_are_of_two_kinds_is_missed_by_no_more_than_a_t_interval_does(count):
    # Most trainings have no sink and some have 25 %: the mean of arcsines is not the arcsine of the mean.
    generator, draws = np.random.default_rng(0), 2000
    rates = np.where(generator.random((draws, count)) < 0.3, generator.normal(0.25, 0.03, (draws, count)).clip(0, 1), 0.002)
    truth = 0.3 * 0.25 + 0.7 * 0.002
    missed = {"below": 0, "t": 0}
    for row in rates:
        if np.ptp(row) == 0:
            continue
        interval = estimate_share(row.tolist(), 1.0).interval
        missed["below"] += interval[1] < truth
        missed["t"] += stats.t.interval(0.95, count - 1, loc=row.mean(), scale=stats.sem(row))[1] < truth
    assert missed["below"] <= missed["t"] < 0.1 * draws
