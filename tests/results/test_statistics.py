"""Intervals over seeds: quantiles against scipy, one interval by hand."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from sinklab.results.statistics import mean_interval, t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 30, 101])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_quantiles_are_those_of_scipy(level, degrees):
    # Near a right angle the tangent multiplies the 2^-53 of the halved angle by its own square: 4e5 for one degree and 0.999.
    assert t_quantile(level, degrees) == pytest.approx(stats.t.ppf((1 + level) / 2, degrees), rel=1e-10)


def test_three_values_by_hand():
    # Mean 2, standard deviation 1, error 1/sqrt(3); t of two degrees at 95 % is 4.302653.
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
