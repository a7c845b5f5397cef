"""Intervals over seeds: by hand, with quantiles from tables of Student's t."""

from __future__ import annotations

import math

import pytest

from sinklab.results.statistics import mean_interval


@pytest.mark.parametrize(
    ("degrees", "level", "quantile"), [(1, 0.95, 12.7062047), (4, 0.95, 2.7764451), (9, 0.5, 0.7027221), (300, 0.95, 1.9679030)]
)
def test_half_widths_are_quantiles_times_the_error(degrees, level, quantile):
    values = [0.0] * degrees + [1.0]  # variance 1 / (degrees + 1)
    _, half = mean_interval(values, level)
    assert half == pytest.approx(quantile / (degrees + 1), rel=1e-7)


def test_three_values_by_hand():
    # Mean 2, standard deviation 1, error 1/sqrt(3); t of two degrees at 95 % is 4.302653.
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
