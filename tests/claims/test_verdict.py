"""The verdict: the rule at its edges, on numbers whose intervals are known."""

from __future__ import annotations

import math
import random

import pytest

from sinklab.errors import ConfigurationError
from sinklab_claims.contract.claim import Part
from sinklab_claims.contract.effect import Difference, Ratio, Rise, Trend, Value
from sinklab_claims.verdict.rule import judge, judge_part

# Three values m - d, m, m + d have the standard error d / sqrt(3), and t(0.975, 2) = 4.3026527.
HALF = 4.302652729911275 / math.sqrt(3.0)
MORE = Part("it rises", Value("loss", "a"), more_than=1.0)
LESS = Part("it stays small", Value("loss", "a"), less_than=1.0)
BETWEEN = Part("it stays", Value("loss", "a"), more_than=-1.0, less_than=1.0)


def seeds(*values: float) -> dict[int, dict[str, dict[str, float]]]:
    return {seed: {"a": {"loss": value, "sink_rate": value}} for seed, value in enumerate(values)}


def test_the_interval_is_students() -> None:
    finding = judge_part(MORE, seeds(9.0, 10.0, 11.0))
    assert finding.mean == 10.0
    assert finding.interval == pytest.approx((10.0 - HALF, 10.0 + HALF), rel=1e-9)
    assert finding.standardized == 10.0
    assert finding.by_seed == {0: 9.0, 1: 10.0, 2: 11.0}
    narrow = judge_part(BETWEEN, seeds(-0.1, 0.0, 0.1))
    assert narrow.verdict == "reproduced"
    record = narrow.record()
    assert (record.effect, record.expected, record.standardized) == ("loss of a", "more than -1 and less than 1", 0.0)
    assert record.by_seed == {"0": -0.1, "1": 0.0, "2": 0.1}
    assert judge_part(BETWEEN, seeds(0.0, 0.0, 0.0)).standardized is None


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


def test_all_parts_must_hold_and_one_may_fail_it() -> None:
    high = seeds(9.0, 10.0, 11.0)
    assert judge([MORE], [], high).verdict == "reproduced"
    assert judge([MORE, LESS], [], high).verdict == "not reproduced"
    unsure = Part("it is twelve", Value("loss", "a"), more_than=10.0)
    judgement = judge([MORE, unsure], [], high)
    assert judgement.verdict == "inconclusive"
    assert judgement.reason == "'it is twelve': the interval over seeds, 7.52 to 12.5, reaches over the bound"


def test_what_is_presupposed_is_judged_like_a_part() -> None:
    there = Part("there is a sink", Value("sink_rate", "a"), more_than=5.0)
    assert judge([MORE], [there], seeds(15.0, 15.1, 15.2)).verdict == "reproduced"
    judgement = judge([MORE], [there], seeds(1.5, 2.0, 2.5))
    assert judgement.verdict == "not tested at this scale"
    assert judgement.reason == "presupposes that there is a sink: sink_rate of a is 2 percent, and would have to be more than 5"
    lost = judge([MORE], [Part("b is there", Value("sink_rate", "b"), more_than=5.0)], seeds(9.0, 10.0, 11.0))
    assert lost.reason.startswith("presupposes that b is there: sink_rate of b could not be measured")


def diverged(*values: float) -> dict[int, dict[str, dict[str, float]]]:
    return {seed: {"a": {"diverged": value}, "b": {"diverged": 0.0}} for seed, value in enumerate(values)}


def test_a_presupposition_that_few_seeds_have_decides_nothing() -> None:
    """Fewer numbers of it must not make a stronger verdict: of eight seeds one or two have the baseline."""
    there = Part("there is a sink", Value("sink_rate", "b"), more_than=5.0)
    numbers = {seed: {"a": {"loss": 9.0 + seed / 10}} for seed in range(8)}
    for seed, rate in ((0, 21.0), (1, 90.0), (2, 25.0)):
        numbers[seed]["b"] = {"sink_rate": rate}
        judgement = judge([MORE], [there], numbers)
        assert judgement.verdict == "inconclusive"
        assert judgement.reason.startswith("presupposes that there is a sink")
    assert judgement.reason.endswith("5 of 8 seeds have no number, and the others cannot speak for them")


@pytest.mark.parametrize(("lost", "verdict"), [(0, "reproduced"), (2, "reproduced"), (3, "inconclusive")])
def test_seeds_without_a_number_are_not_passed_over(lost: int, verdict: str) -> None:
    """Trainings that diverge leave the lucky ones; a quarter may, and more leave it open."""
    judgement = judge([MORE], [], seeds(*(9.0 + seed / 10 for seed in range(8 - lost)), *[math.nan] * lost))
    assert judgement.verdict == verdict
    assert judgement.reason == (
        "'it rises': 3 of 8 seeds have no number, and the others cannot speak for them" if lost == 3 else ""
    )
    assert judgement.findings[0].interval is not None


def test_a_plateau_is_no_rise() -> None:
    """Four equal losses with noise: the largest of three steps is above 0 in nearly every seed, and no step is in all."""
    generator = random.Random(0)
    rise = Part("a step raises it", Rise("loss", ("a", "b", "c", "d")), more_than=0.02)
    verdicts = []
    for _ in range(200):
        numbers = {seed: {name: {"loss": generator.gauss(3.0, 0.04)} for name in "abcd"} for seed in range(8)}
        verdicts.append(judge_part(rise, numbers).verdict)
    assert verdicts.count("reproduced") <= 10  # 2.5 % are expected; the largest step of each seed would make it two in three
    for step in range(3):
        level = [3.0] * (step + 1) + [3.2] * (3 - step)
        numbers = {
            seed: {name: {"loss": value + generator.gauss(0.0, 0.02)} for name, value in zip("abcd", level, strict=True)}
            for seed in range(8)
        }
        finding = judge_part(rise, numbers)
        assert finding.verdict == "reproduced"
        assert finding.mean == pytest.approx(0.2, abs=0.03)
        before, after = "abcd"[step], "abcd"[step + 1]
        assert finding.by_seed == {s: numbers[s][after]["loss"] - numbers[s][before]["loss"] for s in numbers}
    falls = {seed: {name: {"loss": 3.0 - at / 5 + seed / 100} for at, name in enumerate("abcd")} for seed in range(8)}
    assert judge_part(rise, falls).verdict == "not reproduced"


def test_a_count_has_an_exact_interval() -> None:
    """Of 0 in 3 it ends at 1 - 0.025 ** (1 / 3) = 0.708, and not at 0."""
    rare = Part("it does not diverge", Value("diverged", "a"), less_than=0.5)
    finding = judge_part(rare, diverged(0, 0, 0))
    assert finding.interval == pytest.approx((0.0, 1 - 0.025 ** (1 / 3)))
    assert (finding.method, finding.verdict) == ("exact, of counts", "inconclusive")
    assert judge_part(rare, diverged(*[0] * 8)).verdict == "reproduced"  # at most 0.37
    assert judge_part(rare, diverged(*[1] * 8)).verdict == "not reproduced"
    assert judge_part(rare, diverged(1, 0, 0)).interval == pytest.approx((0.00840, 0.90570), abs=1e-5)


def test_a_difference_of_counts_has_one_too() -> None:
    more = Part("it diverges more often", Difference("diverged", "a", "b"), more_than=0.1)
    half = 1 - 0.0125 ** (1 / 3)  # of the share of 1 and of that of -1, each at 97.5 %
    assert judge_part(more, diverged(0, 0, 0)).interval == pytest.approx((-half, half))
    assert judge_part(more, diverged(*[1] * 8)).verdict == "reproduced"


def test_trainings_that_are_all_alike_show_no_spread() -> None:
    none = Part("no sink is left", Value("sink_rate", "a"), less_than=2.0)
    judgement = judge([none], [], seeds(0.0, 0.0, 0.0))
    assert judgement.verdict == "inconclusive"
    assert judgement.reason == (
        "'no sink is left': 3 seeds show no spread to take an interval from; 6 or more would do without"
    )
    assert judge([none], [], seeds(*[0.0] * 5)).verdict == "inconclusive"
    assert judge([none], [], seeds(*[0.0] * 6)).verdict == "reproduced"
    assert judge([none], [], seeds(0.0, 0.0, 0.0), one_model=True).verdict == "holds for this model"


def test_what_is_proved_holds_in_every_seed_or_is_refuted() -> None:
    law = Part("it is exact", Value("law_error", "a"), less_than=1e-9, proved=True)
    errors = {seed: {"a": {"law_error": value, "loss": 9.0 + seed}} for seed, value in enumerate((0.0, 0.0, 5e-10))}
    assert judge([law], [], errors).verdict == "agrees with the proof"
    assert judge([law], [], errors).findings[0].interval == (0.0, 5e-10)
    assert judge([law, MORE], [], errors).verdict == "reproduced"  # of the part that could come out either way
    errors[1]["a"]["law_error"] = 1e-8  # inside the mean of many, and one is enough
    assert judge([law], [], errors).verdict == "contradicts the proof"
    assert judge([law, MORE], [], errors).verdict == "contradicts the proof"


def test_ratios_are_judged_on_their_logarithms() -> None:
    part = Part("it halves", Ratio("sink_rate", "a", "b"), less_than=1.0)
    numbers = {seed: {"a": {"sink_rate": value}, "b": {"sink_rate": 1.0}} for seed, value in enumerate((0.25, 0.5, 1.0))}
    finding = judge_part(part, numbers)
    assert finding.mean == pytest.approx(0.5)
    assert finding.interval == pytest.approx((0.5 * 2**-HALF, 0.5 * 2**HALF))
    assert finding.method == "Student's t of logarithms"
    turned = judge_part(Part("it doubles", Ratio("sink_rate", "b", "a"), more_than=1.0), numbers)
    assert turned.interval == pytest.approx((2 * 2**-HALF, 2 * 2**HALF))  # the same said the other way round


def test_a_cost_over_a_gain_is_no_ratio() -> None:
    """Hidden, the sink gains 0.2 nats, and silenced it costs 0.4: that is not less than half of a cost."""
    part = Part("it costs less than half", Ratio("cost", "silenced", "hidden"), less_than=0.5)
    costs = {seed: {"silenced": {"cost": 0.4}, "hidden": {"cost": -0.2 - seed / 100}} for seed in range(4)}
    found = judge_part(part, costs)
    assert (found.verdict, found.known) == ("inconclusive", 0)
    against = {seed: {label: {"cost": -of["cost"]} for label, of in both.items()} for seed, both in costs.items()}
    assert judge_part(part, against).verdict == "reproduced"  # silenced, it gains; hidden, it costs


def test_a_rank_correlation_over_three_conditions_needs_six_seeds() -> None:
    trend = Part("it rises", Trend("loss", ("a", "b", "c")), more_than=0.4)
    rising = {"a": {"loss": 1.0}, "b": {"loss": 2.0}, "c": {"loss": 3.0}}
    assert judge_part(trend, dict.fromkeys(range(5), rising)).verdict == "inconclusive"
    assert judge_part(trend, dict.fromkeys(range(6), rising)).verdict == "reproduced"
    falling = {"a": {"loss": 3.0}, "b": {"loss": 2.0}, "c": {"loss": 1.0}}
    assert judge_part(trend, dict.fromkeys(range(6), falling)).verdict == "not reproduced"


def test_parts_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the part 'it is' has no bound; give more_than or less_than"):
        Part("it is", Value("sink_rate", "a"))
    with pytest.raises(ConfigurationError, match="nothing lies between 2 and 1"):
        Part("it is", Value("sink_rate", "a"), more_than=2.0, less_than=1.0)
