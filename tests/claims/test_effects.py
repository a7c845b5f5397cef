"""Effects: hand-computed values, and nothing where a number is missing or is no number."""

from __future__ import annotations

import math

import pytest

from sinklab.errors import ConfigurationError
from sinklab.registry import claims
from sinklab_claims.contract.effect import Difference, Effect, Extreme, Ratio, Rise, Slope, Trend, Value

NUMBERS = {"a": {"x": 1.0, "y": 4.0}, "b": {"x": 3.0}, "c": {"x": 2.0}, "d": {"x": 2.0}, "e": {"x": 2.0}}


@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        (Value("x", "b"), 3.0),
        (Difference("x", "b", "a"), 2.0),
        (Difference("y", "a", "b", other="x"), 1.0),
        (Ratio("x", "b", "c"), 1.5),
        (Ratio("y", "a", "c", other="x"), 2.0),
        (Trend("x", ("a", "c", "b")), 1.0),
        (Trend("x", ("b", "c", "a")), -1.0),
        # Ranks 0, 2, 1: the sum of products of deviations is 1 of 2.
        (Trend("x", ("a", "b", "c")), 0.5),
        # Ranks 1.5, 1.5 and 0 against 0, 1, 2: covariance -1.5, spreads 2 and 1.5.
        (Trend("x", ("c", "d", "a")), -1.5 / math.sqrt(3.0)),
        (Trend("x", ("c", "d", "e")), 0.0),  # equal values have no trend
        (Rise("x", ("a", "c", "b")), 1.0),
        (Rise("x", ("b", "c", "a")), -1.0),
        (Rise("x", ("c", "d", "a")), 0.0),
        (Slope("x", ("a", "b"), at=(1.0, 4.0)), 1.0),
        # Over -1, 0 and 1: (1.0 · -1 + 3.0 · 0 + 2.0 · 1) / 2.
        (Slope("x", ("a", "b", "c"), at=(0.5, 1.0, 2.0)), 0.5),
        (Extreme("x", ("a", "b", "c")), 3.0),
        (Extreme("x", ("a", "b", "c"), largest=False), 1.0),
    ],
)
def test_known_values(effect: Effect, expected: float) -> None:
    assert effect(NUMBERS) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("effect", [Value("z", "a"), Value("x", "nobody"), Ratio("x", "a", "lost"), Ratio("x", "a", "zero")])
def test_without_a_number_there_is_no_effect(effect: Effect) -> None:
    assert effect({**NUMBERS, "lost": {"x": math.nan}, "zero": {"x": 0.0}}) is None


def test_orders_that_are_none_are_refused() -> None:

    for at in ((1.0,), (1.0, 1.0), (0.0, 1.0)):
        with pytest.raises(ConfigurationError, match="a slope needs a positive number for each of a, b"):
            Slope("x", ("a", "b"), at=at)


def test_the_interval_of_a_share_is_for_what_is_declared_as_one():
    """A quotient of differences has the unit of a share; the values that it happens to have do not make it one."""
    assert claims["learnable_sink"], "its file declares the quotient"
    share, signed = Value("first_attention", "a"), Value("left_by_one", "a")
    assert (share.unit, signed.unit) == ("fraction", "fraction")
    values = [0.01, 0.02, 0.06]
    assert "arcsine" in share.estimate(values).method
    assert signed.estimate(values).method == signed.estimate([-0.01, *values]).method == "Student's t"
    assert share.estimate([0.9, 1 + 1e-7, 0.95]).method == share.estimate([0.9, 1.0, 0.95]).method  # rounding


def test_a_slope_of_outcomes_is_no_count():
    """Eight seeds diverge at the low rate alone, so that the slope is -1 in each: its interval holds it."""
    found = Slope("diverged", ("low", "high"), at=(1.0, 2.0)).estimate([-1.0] * 8)
    assert (found.middle, found.interval) == (-1.0, (-1.0, -1.0))
    assert found.method == "exact, of the median"


def test_a_share_is_one_in_any_unit_and_what_compares_shares_is_none():
    assert claims["cliff_at_the_cache_size"], "its file declares the shares"
    assert "arcsine" in Value("held by both", "a").estimate([0.1, 0.2, 0.6]).method  # of digits
    assert "arcsine" in Extreme("held by both", ("a", "b")).estimate([0.1, 0.2, 0.6]).method
    compared = (
        Difference("held by both", "a", "b"),
        Rise("held by both", ("a", "b")),
        Slope("held by both", ("a", "b"), at=(1.0, 2.0)),
    )
    assert {effect.estimate([0.1, 0.2, 0.6]).method for effect in compared} == {"Student's t"}
    assert Ratio("held by both", "a", "b").estimate([0.1, 0.2, 0.6]).method == "Student's t of logarithms"
    assert Trend("held by both", ("a", "b", "c")).estimate([0.5] * 6).method == "exact, of the median"
