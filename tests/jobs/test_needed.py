"""Seeds that would decide: the first count at which the interval clears the bound, if seeds go on to scatter as they do."""

from __future__ import annotations

import math
import statistics

import pytest

from sinklab.jobs.claim import Part
from sinklab.jobs.effect import Difference, Ratio, Trend, Value
from sinklab.jobs.needed import MOST, leans_inside, needed_seeds
from sinklab.jobs.verdict import judge_part

RATE = Value("sink_rate", "a")


def found(part: Part, *values: float):
    """What the rule makes of a part when its only number has these values, seed by seed."""
    numbers = {seed: {"a": {"sink_rate": value, "loss": value, "diverged": value}} for seed, value in enumerate(values)}
    return judge_part(part, numbers)


@pytest.mark.parametrize(
    ("part", "values", "scale", "back"),
    [
        (Part("it rises", Value("loss", "a"), more_than=0.1), (0.15, 0.11, 0.13), float, float),
        (Part("it stays", Value("loss", "a"), more_than=-0.1, less_than=0.2), (0.15, 0.05, 0.09), float, float),
        (Part("it rises", Value("loss", "a"), more_than=0.2), (0.25, 0.11, 0.13), float, float),
        (Part("there is a sink", RATE, more_than=5), (4.0, 20.0, 12.0), lambda x: math.asin(math.sqrt(x / 100)), None),
    ],
)
def test_so_many_seeds_of_the_same_middle_and_spread_decide_and_one_fewer_do_not(part, values, scale, back):
    """A sample of exactly that middle and that spread, on the scale of the interval, is judged by the rule itself."""
    first = found(part, *values)
    assert first.verdict == "inconclusive"
    needed = needed_seeds(first.to_dict())
    assert needed is not None
    middle = statistics.fmean(scale(value) for value in values)
    spread = statistics.stdev(scale(value) for value in values)
    assert [_of_shape(part, middle, spread, count, back).verdict for count in (needed - 1, needed)] == [
        "inconclusive",
        "reproduced" if leans_inside(first.to_dict()) else "not reproduced",
    ]


def _of_shape(part: Part, middle: float, spread: float, count: int, back) -> object:
    raw = [math.sin(1 + 2 * index) for index in range(count)]
    centre, width = statistics.fmean(raw), statistics.stdev(raw)
    shaped = [middle + spread * (value - centre) / width for value in raw]
    return found(part, *(shaped if back is float else [100 * math.sin(value) ** 2 for value in shaped]))


def test_ratios_are_foretold_on_the_scale_of_their_logarithms():
    part = Part("it halves", Ratio("loss", "a", "b"), less_than=0.5)
    numbers = {seed: {"a": {"loss": value}, "b": {"loss": 1.0}} for seed, value in enumerate((0.1, 0.4, 0.7))}
    first = judge_part(part, numbers)
    assert first.verdict == "inconclusive"
    logs = [math.log(value) for value in (0.1, 0.4, 0.7)]
    shaped = _as_logs(statistics.fmean(logs), statistics.stdev(logs), needed_seeds(first.to_dict()))
    assert judge_part(part, shaped).verdict == "reproduced"


def _as_logs(middle: float, spread: float, count: int | None) -> dict:
    assert count is not None
    raw = [math.sin(1 + 2 * index) for index in range(count)]
    centre, width = statistics.fmean(raw), statistics.stdev(raw)
    return {
        seed: {"a": {"loss": math.exp(middle + spread * (value - centre) / width)}, "b": {"loss": 1.0}}
        for seed, value in enumerate(raw)
    }


def test_what_never_happens_is_decided_by_the_exact_interval():
    part = Part("it diverges", Value("diverged", "a"), more_than=0.5)
    first = found(part, 0.0, 0.0, 0.0)
    assert first.verdict == "inconclusive"
    needed = needed_seeds(first.to_dict())
    # No success of n has 1 - 0.025 ** (1 / n) for its upper end, which is at most a half from six on.
    assert needed == 6
    assert found(part, *[0.0] * 6).verdict == "not reproduced"
    assert found(part, *[0.0] * 5).verdict == "inconclusive"


def test_trainings_that_are_all_alike_need_six():
    assert needed_seeds(found(Part("none", Value("loss", "a"), less_than=1), 0.0, 0.0, 0.0).to_dict()) == 6


def test_where_nothing_can_be_foretold():
    on_the_bound = found(Part("more", Value("loss", "a"), more_than=0.2), 0.1, 0.2, 0.3).to_dict()
    on_the_bound["more_than"] = on_the_bound["mean"]
    assert needed_seeds(on_the_bound) is None
    near = found(Part("more", Value("loss", "a"), more_than=0.2), 0.1, 0.2, 0.3000001).to_dict()
    assert needed_seeds(near) is None, MOST
    trend = Part("it rises", Trend("loss", ("a", "b", "c")), more_than=0.5)
    orders = ((1, 2, 3), (1, 2, 3), (3, 2, 1), (1, 2, 3), (3, 2, 1), (1, 2, 3), (1, 2, 3))
    numbers = {seed: dict(zip("abc", ({"loss": float(x)} for x in of), strict=True)) for seed, of in enumerate(orders)}
    open_trend = judge_part(trend, numbers)
    assert open_trend.verdict == "inconclusive"
    assert needed_seeds(open_trend.to_dict()) is None
    assert needed_seeds(found(Part("lost", Value("other", "a"), more_than=5), 1.0, 2.0, 3.0).to_dict()) is None


def test_too_few_seeds_need_three():
    assert needed_seeds(found(Part("more", Value("loss", "a"), more_than=0.2), 0.1).to_dict()) == 3


def test_the_side_on_which_the_middle_lies():
    part = Part("between", Difference("loss", "a", "b"), more_than=-1, less_than=1)
    for value, inside in ((0.5, True), (1.5, False), (-1.0, False)):
        numbers = {seed: {"a": {"loss": value + seed / 10}, "b": {"loss": 0.1}} for seed in range(3)}
        assert leans_inside(judge_part(part, numbers).to_dict()) is inside
