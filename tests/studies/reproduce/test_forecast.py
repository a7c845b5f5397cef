"""Seeds that would decide: the count at which the interval clears the bound with a chance of four in five."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sinklab.results.intervals import CHANCE
from sinklab_claims.contract.claim import Part
from sinklab_claims.contract.effect import Difference, Ratio, Trend, Value
from sinklab_claims.verdict.forecast import MOST, needed_seeds
from sinklab_claims.verdict.rule import judge_part

RATE = Value("sink_rate", "a")


def found(part: Part, *values: float):
    """What the rule makes of a part when its only number has these values, seed by seed."""
    numbers = {seed: {"a": {"sink_rate": value, "loss": value, "diverged": value}} for seed, value in enumerate(values)}
    return judge_part(part, numbers)


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (Part("it rises", Value("loss", "a"), more_than=0.1), (0.15, 0.11, 0.13)),
        (Part("it stays", Value("loss", "a"), more_than=-0.1, less_than=0.2), (0.15, 0.05, 0.09)),
        (Part("it rises", Value("loss", "a"), more_than=0.2), (0.25, 0.11, 0.13, 0.12, 0.2, 0.08)),
    ],
)
def test_seeds_drawn_from_what_is_possible_decide_in_four_of_five_worlds(part, values):
    """The plain reference: draw a middle and a spread, then every later seed, and ask the rule itself."""
    first = found(part, *values)
    assert first.verdict == "inconclusive"
    needed = needed_seeds(first.record())
    assert needed is not None
    assert needed > len(values)
    worlds = 600
    share = _decided(part, values, needed, worlds)
    assert abs(share - CHANCE) < 4 * math.sqrt(CHANCE * (1 - CHANCE) / worlds) + 0.02  # which one seed more may make
    assert _decided(part, values, len(values) + (needed - len(values)) // 3, worlds) < share + 0.02


def _decided(part: Part, values: Sequence[float], count: int, worlds: int) -> float:
    generator = np.random.default_rng(7)
    middle, squares, seen = statistics.fmean(values), statistics.variance(values) * (len(values) - 1), len(values)
    decided = 0
    for _ in range(worlds):
        spread = math.sqrt(squares / generator.chisquare(seen - 1))
        true = generator.normal(middle, spread / math.sqrt(seen))
        later = generator.normal(true, spread, count - seen)
        decided += found(part, *values, *map(float, later)).verdict != "inconclusive"
    return decided / worlds


def test_forecasts_come_true_in_four_of_five_cases():
    """Trainings whose middles lie anywhere around the bound: those that are open at eight, at the count that is foretold."""
    generator, seen = np.random.default_rng(11), 8
    part, came_true = Part("it rises", Value("loss", "a"), more_than=0.0), []
    while len(came_true) < 100:
        values = [float(value) for value in generator.normal(generator.uniform(-3, 3), 1.0, 1000)]
        first = found(part, *values[:seen])
        needed = needed_seeds(first.record()) if first.verdict == "inconclusive" else None
        if needed is not None:
            came_true.append(found(part, *values[:needed]).verdict != "inconclusive")
    assert 0.7 < statistics.fmean(came_true) < 0.9  # 0.61 where middle and spread are taken as they are


def test_ratios_and_rates_are_foretold_on_the_scale_of_their_intervals():
    numbers = {seed: {"a": {"loss": value}, "b": {"loss": 1.0}} for seed, value in enumerate((0.1, 0.4, 0.7))}
    ratio = judge_part(Part("it halves", Ratio("loss", "a", "b"), less_than=0.5), numbers)
    logs = found(Part("it falls", Value("loss", "a"), less_than=math.log(0.5)), *(math.log(value) for value in (0.1, 0.4, 0.7)))
    assert ratio.verdict == logs.verdict == "inconclusive"
    assert needed_seeds(ratio.record()) == needed_seeds(logs.record()) is not None


def test_a_rate_seen_from_the_other_end_takes_as_many_seeds():
    values = (4.0, 20.0, 12.0)
    rate = found(Part("there is a sink", RATE, more_than=5), *values)
    other = found(Part("hardly any has none", RATE, less_than=95), *(100 - value for value in values))
    plain = found(Part("it rises", Value("loss", "a"), more_than=5), *values)
    assert rate.verdict == other.verdict == plain.verdict == "inconclusive"
    needed = needed_seeds(rate.record())
    assert needed is not None
    assert needed_seeds(other.record()) == pytest.approx(needed, rel=0.15)  # by how much 4096 draws scatter it
    # Near its end the interval of a rate is shorter towards it, so that a bound there is cleared later than by plain t.
    assert needed != needed_seeds(plain.record())


def test_what_never_happens_is_decided_by_the_exact_interval():
    part = Part("it diverges", Value("diverged", "a"), more_than=0.5)
    first = found(part, 0.0, 0.0, 0.0)
    assert first.verdict == "inconclusive"
    needed = needed_seeds(first.record())
    assert needed is not None
    generator, decided = np.random.default_rng(3), 0
    for _ in range(600):
        later = generator.uniform(size=needed - 3) < generator.beta(0.5, 3.5)  # of Jeffreys, after 0 of 3
        decided += found(part, 0.0, 0.0, 0.0, *map(float, later)).verdict != "inconclusive"
    assert abs(decided / 600 - CHANCE) < 0.09
    # No success of n has 1 - 0.025 ** (1 / n) for its upper end, at most a half from six on; more allow for a success.
    assert found(part, *[0.0] * 5).verdict == "inconclusive"
    assert needed > 6


def test_a_difference_of_outcomes_is_foretold_as_one_whichever_side_of_0_its_interval_lies():
    part = Part("it diverges more often", Difference("diverged", "a", "b"), more_than=0.5)

    def judged(count: int):
        return judge_part(part, {seed: {"a": {"diverged": 1.0}, "b": {"diverged": 0.0}} for seed in range(count)})

    decides = next(count for count in range(3, 100) if judged(count).verdict == "reproduced")
    assert decides == 16
    for count in range(3, decides):
        assert judged(count).verdict == "inconclusive"
        needed = needed_seeds(judged(count).record())
        assert needed is None or needed >= decides


def test_outcomes_at_the_level_of_several_steps_take_more_seeds():
    alone = found(Part("it diverges", Value("diverged", "a"), more_than=0.5), 1.0, 1.0, 1.0).record()
    assert needed_seeds(alone) < needed_seeds(replace(alone, steps=20))


def test_steps_take_more_seeds_than_a_number_that_is_judged_alone():
    """The interval of each is at 97.5 % where there are two, which is wider by 14 to 20 %."""
    values = [1.5, -0.5, 2.5, 0.8, -1.0, 1.9]
    alone = found(Part("it is above 0", Value("loss", "a"), more_than=0.0), *values).record()
    more, most = needed_seeds(replace(alone, steps=2)), needed_seeds(replace(alone, steps=10))
    assert needed_seeds(alone) < more < most


def test_trainings_that_are_all_alike_need_six():
    assert needed_seeds(found(Part("none", Value("loss", "a"), less_than=1), 0.0, 0.0, 0.0).record()) == 6


def test_where_nothing_can_be_foretold():
    near = found(Part("more", Value("loss", "a"), more_than=0.2), *(0.1, 0.3) * 40).record()
    assert near.verdict == "inconclusive"
    assert needed_seeds(near) is None, MOST
    trend = Part("it rises", Trend("loss", ("a", "b", "c")), more_than=0.5)
    orders = ((1, 2, 3), (1, 2, 3), (3, 2, 1), (1, 2, 3), (3, 2, 1), (1, 2, 3), (1, 2, 3))
    numbers = {seed: dict(zip("abc", ({"loss": float(x)} for x in of), strict=True)) for seed, of in enumerate(orders)}
    open_trend = judge_part(trend, numbers)
    assert open_trend.verdict == "inconclusive"
    assert needed_seeds(open_trend.record()) is None
    assert needed_seeds(found(Part("lost", Value("other", "a"), more_than=5), 1.0, 2.0, 3.0).record()) is None


def test_too_few_seeds_need_three():
    assert needed_seeds(found(Part("more", Value("loss", "a"), more_than=0.2), 0.1).record()) == 3
