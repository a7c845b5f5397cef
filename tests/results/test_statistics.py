"""Intervals over seeds, over items and of shares: by hand, with quantiles from tables, and resampled one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from sinklab.errors import ConfigurationError
from sinklab.results.intervals import (
    Interval,
    function_over_items,
    least_count_above,
    mean_interval,
    mean_over_items,
    means_over_items,
    rare_cost,
)


@pytest.mark.parametrize(
    ("degrees", "level", "quantile"), [(1, 0.95, 12.7062047), (4, 0.95, 2.7764451), (9, 0.5, 0.7027221), (300, 0.95, 1.9679030)]
)
def test_half_widths_are_quantiles_times_the_error(degrees, level, quantile):
    values = [0.0] * degrees + [1.0]  # variance 1 / (degrees + 1)
    _, half = mean_interval(values, level)
    assert half == pytest.approx(quantile / (degrees + 1), rel=1e-7)


# Percentages of the bootstrap at 95 %: the normal tail at sqrt(n / (n - 1)) times the quantile of Student's t of n - 1 degrees.
@pytest.mark.parametrize(("items", "quantile", "level"), [(8, 2.3646243, 0.95), (10, 0.7027221, 0.5)])
def test_intervals_over_items_are_widened_percentiles_of_resampled_means(items, quantile, level):
    values = np.array([0.5, 2.0, 1.0, 7.0, 3.0, 0.0, 0.25, 4.0, 1.5, 6.0])[:items]
    draws = np.random.default_rng(0).integers(items, size=(10_000, items))
    means = sorted(float(np.mean(values[draw])) for draw in draws)
    tail = 0.5 * math.erfc(math.sqrt(items / (items - 1)) * quantile / math.sqrt(2))
    found = mean_over_items(values, level=level)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(np.quantile(means, tail), abs=1e-6)
    assert found.high == pytest.approx(np.quantile(means, 1 - tail), abs=1e-6)
    assert found.to_dict() == {"mean": found.mean, "low": found.low, "high": found.high}


def test_many_means_are_those_of_each():
    values = np.random.default_rng(1).normal(size=(130, 6))
    found = means_over_items(values)
    assert len(found) == 130
    for number in (0, 63, 64, 127, 128, 129):
        assert list(found[number].to_dict().values()) == pytest.approx(list(mean_over_items(values[number]).to_dict().values()))


@pytest.mark.parametrize("items", [2, 3, 4, 7])
def test_intervals_over_very_few_items_are_those_of_student(items):
    """No resample is below the least item, where an interval of so few has to reach: of two items, 12.7 times the error."""
    values = np.array([[1.0, 3.0, -2.0, 0.5, 0.1, 7.0, -1.0], [2.0, 2.5, 2.25, 4.0, 1.0, 1.5, 3.0]])[:, :items]
    for row, found in zip(values, means_over_items(values), strict=True):
        expected = mean_interval(list(row))
        assert found.mean == pytest.approx(expected[0])
        assert (found.low, found.high) == pytest.approx((expected[0] - expected[1], expected[0] + expected[1]))
    of_one = function_over_items(values, lambda means: means[0])
    assert list(of_one.to_dict().values()) == pytest.approx(list(mean_over_items(values[0]).to_dict().values()))


@pytest.mark.parametrize("items", [2, 3, 4, 5, 6])
def test_intervals_over_few_items_hold_their_level(items):
    """Of normal items: without Student's t, two were held in 57 % and three in 71 % of the cases."""
    draws = np.random.default_rng(0).normal(size=(1000, items))
    held = np.mean([found.low <= 0 <= found.high for found in means_over_items(draws)])
    assert held > 0.93
    ratios = np.random.default_rng(1).normal([[[1.0], [2.0]]], 0.1, size=(300, 2, items))
    found = [function_over_items(pair, lambda means: means[0] / means[1]) for pair in ratios]
    assert np.mean([one.low <= 0.5 <= one.high for one in found]) > 0.88


def test_the_ratio_of_three_items_by_hand():
    """Leaving one out gives 5/8, 4/7 and 3/7; the sum of their squared distances, times two thirds, is the variance."""
    found = function_over_items(np.array([[1.0, 2.0, 3.0], [3.0, 4.0, 4.0]]), lambda means: means[0] / means[1])
    left_out = np.array([5 / 8, 4 / 7, 3 / 7])
    half = 4.302653 * math.sqrt(2 / 3 * ((left_out - left_out.mean()) ** 2).sum())
    assert found.mean == pytest.approx(6 / 11)
    assert (found.low, found.high) == pytest.approx((6 / 11 - half, 6 / 11 + half), rel=1e-6)


def test_one_item_is_no_interval():
    with pytest.raises(ConfigurationError, match=r"^an interval needs two items or more, got 1; take more of them$"):
        mean_over_items([1.0])


def test_items_that_are_all_the_same_have_the_rule_of_three():
    assert mean_over_items([0.4] * 6) == Interval(pytest.approx(0.4), pytest.approx(0.4), pytest.approx(0.4))
    found = mean_over_items([0.5] * 6, scale=2.0)
    assert (found.mean, found.low, found.high) == (0.5, -0.5, 1.5)
    spread = mean_over_items([0.5, 0.5001] * 4, scale=2.0)  # what varies at all is resampled
    assert (spread.low, spread.high) == (pytest.approx(0.50005, abs=1e-4), pytest.approx(0.50005, abs=1e-4))


@pytest.mark.parametrize("cases", [1, 7, 40])
@pytest.mark.parametrize(("share", "level"), [(0.1, 0.95), (0.5, 0.95), (0.02, 0.8)])
def test_least_counts_are_the_first_whose_wilson_interval_of_scipy_is_above(share, level, cases):
    def low(count: int) -> float:
        return scipy.stats.binomtest(count, cases).proportion_ci(level, method="wilson").low

    expected = next((count for count in range(cases + 1) if low(count) > share), cases + 1)
    assert least_count_above(share, cases, level=level) == expected


@pytest.mark.parametrize("count", [9, 24, 64, 1000])
def test_the_rarest_cost_that_is_seen_is_missed_in_one_of_twenty_draws(count):
    said = int(rare_cost(count).split("one text in ")[1].split(" ")[0].replace(",", ""))
    assert (1 - 1 / said) ** count < 0.05
    assert (1 - 1 / (1.2 * said)) ** count > 0.05
