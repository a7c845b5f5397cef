"""The verdict: the rule at its edges, on numbers whose intervals are known."""

from __future__ import annotations

import math

import pytest

from sinklab.errors import ConfigurationError
from sinklab.jobs.claim import Difference, Part, Value
from sinklab.jobs.verdict import judge, judge_part

# Three values m - d, m, m + d have the standard error d / sqrt(3), and t(0.975, 2) = 4.3026527.
HALF = 4.302652729911275 / math.sqrt(3.0)
MORE = Part("it rises", Value("sink_rate", "a"), more_than=1.0)
LESS = Part("it stays small", Value("sink_rate", "a"), less_than=1.0)
BETWEEN = Part("it stays", Value("sink_rate", "a"), more_than=-1.0, less_than=1.0)


def seeds(*values: float) -> dict[int, dict[str, dict[str, float]]]:
    return {seed: {"a": {"sink_rate": value}} for seed, value in enumerate(values)}


def test_the_interval_is_students() -> None:
    finding = judge_part(MORE, seeds(9.0, 10.0, 11.0))
    assert finding.mean == 10.0
    assert finding.interval == pytest.approx((10.0 - HALF, 10.0 + HALF), rel=1e-9)
    assert finding.standardized == 10.0
    assert finding.by_seed == {0: 9.0, 1: 10.0, 2: 11.0}


@pytest.mark.parametrize(
    ("part", "middle", "verdict"),
    [
        (MORE, 1.0 + HALF + 1e-6, "reproduced"),
        (MORE, 1.0 + HALF - 1e-6, "inconclusive"),
        (MORE, 1.0 - HALF + 1e-6, "inconclusive"),
        (MORE, 1.0 - HALF - 1e-6, "not reproduced"),
        (LESS, 1.0 - HALF - 1e-6, "reproduced"),
        (LESS, 1.0 - HALF + 1e-6, "inconclusive"),
        (LESS, 1.0 + HALF + 1e-6, "not reproduced"),
        (BETWEEN, 0.0, "inconclusive"),  # the interval is wider than the region
        (BETWEEN, 9.0, "not reproduced"),
        (BETWEEN, -9.0, "not reproduced"),
    ],
)
def test_the_rule_at_its_edges(part: Part, middle: float, verdict: str) -> None:
    assert judge_part(part, seeds(middle - 1.0, middle, middle + 1.0)).verdict == verdict


def test_a_narrow_interval_between_the_bounds_is_reproduced() -> None:
    assert judge_part(BETWEEN, seeds(-0.1, 0.0, 0.1)).verdict == "reproduced"


def test_two_seeds_say_nothing_however_clear() -> None:
    judgement = judge([MORE], [], seeds(100.0, 100.0))
    assert judgement.verdict == "inconclusive"
    assert judgement.reason == "'it rises': 2 seeds; a verdict needs 3"
    assert judgement.findings[0].mean == 100.0
    assert judgement.findings[0].interval is None


def test_a_seed_without_a_number_is_no_seed() -> None:
    judgement = judge([MORE], [], seeds(100.0, 100.0, math.nan))
    assert judgement.reason == "'it rises': 3 seeds, 1 of them without a number; a verdict needs 3"
    assert judge([MORE], [], {}).findings[0].mean is None


def test_all_parts_must_hold_and_one_may_fail_it() -> None:
    high = seeds(9.0, 10.0, 11.0)
    assert judge([MORE], [], high).verdict == "reproduced"
    assert judge([MORE, LESS], [], high).verdict == "not reproduced"
    unsure = Part("it is twelve", Value("sink_rate", "a"), more_than=10.0)
    judgement = judge([MORE, unsure], [], high)
    assert judgement.verdict == "inconclusive"
    assert judgement.reason == "'it is twelve': the interval over seeds reaches over the bound"


def test_what_is_presupposed_is_judged_by_its_mean() -> None:
    there = Part("there is a sink", Value("sink_rate", "a"), more_than=5.0)
    assert judge([MORE], [there], seeds(5.0, 5.1, 5.2)).verdict == "reproduced"
    judgement = judge([MORE], [there], seeds(1.5, 2.0, 2.5))
    assert judgement.verdict == "not tested at this scale"
    assert judgement.reason == "presupposes that there is a sink: sink_rate of a is 2 percent, and would have to be more than 5"
    lost = judge([MORE], [Part("b is there", Value("sink_rate", "b"), more_than=5.0)], seeds(9.0, 10.0, 11.0))
    assert lost.reason.startswith("presupposes that b is there: sink_rate of b could not be measured")


def test_swapping_the_sides_of_a_difference_turns_the_verdict() -> None:
    numbers = {seed: {"a": {"sink_rate": 10.0 + seed}, "b": {"sink_rate": float(seed)}} for seed in range(3)}
    for of, against, verdict in (("a", "b", "reproduced"), ("b", "a", "not reproduced")):
        part = Part("a is larger", Difference("sink_rate", of, against), more_than=1.0)
        assert judge([part], [], numbers).verdict == verdict


def test_parts_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the part 'it is' has no bound; give more_than or less_than"):
        Part("it is", Value("sink_rate", "a"))
    with pytest.raises(ConfigurationError, match="nothing lies between 2 and 1"):
        Part("it is", Value("sink_rate", "a"), more_than=2.0, less_than=1.0)


def test_findings_are_plain_json() -> None:
    found = judge_part(BETWEEN, seeds(-0.1, 0.0, 0.1)).to_dict()
    assert found["effect"] == "sink_rate of a"
    assert found["expected"] == "more than -1 and less than 1"
    assert found["by_seed"] == {"0": -0.1, "1": 0.0, "2": 0.1}
    assert found["standardized"] == 0.0
    assert judge_part(BETWEEN, seeds(0.0, 0.0, 0.0)).standardized is None
