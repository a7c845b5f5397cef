"""The rules of the verdict: intervals against simulated truth and by hand, each branch of the judge, and effective lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.special

from sinklab.results.intervals import function_over_items, mean_over_items, means_over_items
from sinklab.studies.depend.measurement import _score, judge, measure_dependence

RULES = {"minimal_effect": 0.05, "chance": 0.1, "scale": 1.0}


def spread(mean: float, count: int = 64, width: float = 0.02) -> np.ndarray:
    """``count`` numbers with exactly that mean, evenly spread."""
    return mean + width * np.linspace(-1.0, 1.0, count)


class TestInterval:
    def test_is_about_student_t_for_normal_numbers(self):
        """For the mean of near-normal numbers both intervals agree; 10,000 resamples leave about 2 % in each half."""
        values = np.random.default_rng(1).normal(3.0, 2.0, size=200)
        found = mean_over_items(values)
        half = 1.972 * values.std(ddof=1) / np.sqrt(200)  # t of 199 degrees
        assert found.mean == pytest.approx(values.mean())
        assert found.high - found.mean == pytest.approx(half, rel=0.06)
        assert found.mean - found.low == pytest.approx(half, rel=0.06)

    @pytest.mark.slow
    def test_holds_the_truth_as_often_as_it_says(self):
        """95 % for normal numbers; of 8 items of a skewed population it holds the mean in 87 %, as Student's t would."""
        generator = np.random.default_rng(2)
        hits = sum(_holds(mean_over_items(generator.exponential(size=8)), 1.0) for _ in range(400))
        assert 0.84 < hits / 400 < 0.95
        hits = sum(_holds(mean_over_items(generator.normal(size=8)), 0.0) for _ in range(400))
        assert 0.92 < hits / 400 <= 0.99

    def test_same_values_are_no_certainty(self):
        """60 items without an exception: rule of three, 3 / 60."""
        found = mean_over_items(np.zeros(60), scale=1.0)
        assert (found.low, found.high) == (pytest.approx(-0.05), pytest.approx(0.05))
        assert mean_over_items(np.ones(60)).low == 1.0  # of numbers without a range, nothing more can be said

    def test_changes_one_way_alone_leave_room_for_the_other(self):
        """Of 64 items 61 stay and 3 rise: none falls, which 3 in 64 might; no resample shows it, so that the end would be 0."""
        values = np.repeat([0.0, 1.0], [61, 3])
        assert mean_over_items(values, scale=1.0).low >= 0.0
        found = mean_over_items(values, scale=1.0, paired=True)
        plain = mean_over_items(values, scale=1.0)
        assert found.low == pytest.approx(found.mean - np.hypot(found.mean - plain.low, 3 / 64))
        assert found.low < -0.01
        assert found.high == plain.high
        turned = mean_over_items(-values, scale=1.0, paired=True)
        assert (turned.low, turned.high) == (pytest.approx(-found.high), pytest.approx(-found.low, abs=0.01))
        both = np.repeat([-1.0, 0.0, 1.0], [1, 60, 3])  # seen on both sides: nothing is joined
        assert mean_over_items(both, scale=1.0, paired=True) == mean_over_items(both, scale=1.0)
        most = np.repeat([0.0, 1.0], [20, 44])
        assert mean_over_items(most, scale=1.0, paired=True) == mean_over_items(most, scale=1.0)

    def test_an_index_of_changes_one_way_leaves_room_for_the_other(self):
        """Of 64 answers 38 are right, 2 of which go without the sink: 3 in 64 might come, of 0.49 above chance."""
        visible = np.repeat([1.0, 0.0], [38, 26])
        hidden = np.repeat([0.0, 1.0, 0.0], [2, 36, 26])
        about = {"chance": 0.1, "scale": 1.0}
        found = measure_dependence(visible, hidden, np.zeros(64), **about)
        room = 38 / 64 - 0.1
        assert found.mean == pytest.approx(2 / 64 / room)
        assert found.low < found.mean - 3 / 64 / room < 0.0
        unseen = measure_dependence(hidden, visible, np.zeros(64), **about)  # the sink does harm: the same with its sign turned
        assert (unseen.low, unseen.high) == (pytest.approx(-found.high, abs=0.01), pytest.approx(-found.low, abs=0.01))
        unbounded = measure_dependence(visible, hidden, np.zeros(64), chance=0.1, scale=None)
        assert unbounded.low >= 0.0  # of scores without a range nothing more can be said
        assert unbounded.high == found.high

    @pytest.mark.slow
    def test_an_index_of_rare_changes_holds_the_truth(self):
        """Right answers go, and wrong ones come, in 2 % of cases; without room for what was not seen 81 % of intervals do."""
        generator, held = np.random.default_rng(6), 0
        for _ in range(300):
            visible = (generator.random(64) < 0.6).astype(float)
            hidden = np.where(generator.random(64) < 0.02, 1.0 - visible, visible)
            held += _holds(measure_dependence(visible, hidden, np.zeros(64), chance=0.1, scale=1.0), 0.004 / 0.5)
        assert held / 300 > 0.93

    @pytest.mark.slow
    def test_rare_paired_changes_hold_the_truth(self):
        """Of differences of -1, 0 and 1 with chances of 1, 97 and 2 %; without the second error 85 % of intervals do."""
        generator = np.random.default_rng(5)
        drawn = generator.choice([-1.0, 0.0, 1.0], p=[0.01, 0.97, 0.02], size=(1000, 64))
        hits = sum(_holds(found, 0.01) for found in means_over_items(drawn, scale=1.0, paired=True))
        assert hits / 1000 > 0.94

    @pytest.mark.parametrize("count", [2, 5, 8, 64])
    def test_wider_at_every_level(self, count):
        """Beyond what 10,000 resamples show it is Student's; resampling alone would stop growing at its outermost mean."""
        values = np.random.default_rng(3).exponential(size=count)
        found = [mean_over_items(values, level=level) for level in (0.9, 0.99, 0.999, 0.9999, 0.99999)]
        assert all(wide.low < narrow.low and wide.high > narrow.high for narrow, wide in itertools.pairwise(found))
        half = scipy.special.stdtrit(count - 1, 1 - 0.5e-5) * values.std(ddof=1) / np.sqrt(count)
        assert found[-1].high - values.mean() == pytest.approx(half)
        product = function_over_items(np.stack([values, values]), lambda means: means[0] * means[1], level=0.99999)
        assert product.high - product.mean == pytest.approx(2 * half * values.mean(), rel=0.35)  # bent, by the error's square


def _holds(interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high


class TestJudge:
    def test_yes(self):
        found = judge(spread(0.8), spread(0.4), spread(0.1), **RULES)
        assert found.verdict == "yes"
        assert found.difference.mean == pytest.approx(0.4)
        assert found.reason == "the whole interval of the difference lies above 0.05"

    def test_no(self):
        found = judge(spread(0.81, width=0.03), spread(0.8), spread(0.1), **RULES)
        assert found.verdict == "no"
        assert found.reason == "the whole interval of the difference lies within ± 0.05"

    def test_at_chance_is_not_no(self):
        """Two policies that both guess differ by nothing, which says nothing."""
        found = judge(spread(0.1), spread(0.1), spread(0.1), **RULES)
        assert found.verdict == "undecided"
        assert (
            found.reason
            == "the model is not shown to be above chance, with sinks or without: 0.1 at best, and 0.1 needs no model"
        )

    def test_at_chance_is_not_yes(self):
        """What falls from chance to below it without sinks is no knowledge: an answer in another form, for instance."""
        found = judge(spread(0.1), spread(0.0, width=0.001), spread(0.1), **RULES)
        assert found.difference.low > 0.05
        assert found.verdict == "undecided"
        assert "not shown to be above chance" in found.reason

    def test_a_score_without_context_is_not_no(self):
        found = judge(spread(0.8), spread(0.8), spread(0.8), **RULES)
        assert (found.verdict, found.reason) == (
            "undecided",
            "the score is not shown to be better than with next to nothing in the cache",
        )

    def test_too_few_items_are_undecided(self):
        values = np.array([0.9, 0.3, 0.8, 0.4, 0.7, 0.5])
        found = judge(values, values[::-1], np.full(6, 0.0), **RULES)
        assert (found.verdict, found.reason) == ("undecided", "the interval of the difference reaches across 0.05 or -0.05")
        found = judge(values[:2], np.zeros(2), np.zeros(2), **RULES)  # of two items the interval is wide, whatever they are
        expected = "the model is not shown to be above chance, with sinks or without: 0.6 at best, and 0.1 needs no model"
        assert (found.verdict, found.reason) == ("undecided", expected)

    def test_sinks_that_cost_are_said_to(self):
        found = judge(spread(0.5), spread(0.8), spread(0.1), **RULES)
        assert (found.verdict, found.reason) == (
            "undecided",
            "sinks cost more than 0.05 here: the window they take is worth more",
        )

    def test_just_above_and_within_the_minimal_effect(self):
        """What counts is where the whole interval lies, not the mean."""
        assert judge(spread(0.86, width=0.06), spread(0.8)[::-1], spread(0.1), **RULES).verdict == "undecided"
        assert judge(spread(0.89, width=0.001), spread(0.8), spread(0.1), **RULES).verdict == "yes"

    def test_nats_have_no_chance(self):
        found = judge(spread(-2.0), spread(-2.5), spread(-6.0), minimal_effect=0.05, chance=None, scale=None)
        assert found.verdict == "yes"

    def test_pairing_counts(self):
        """Items differ by far more than the policies do; only their differences matter."""
        items = np.random.default_rng(3).uniform(-9.0, -1.0, size=32)
        found = judge(items + 0.2, items, items - 3.0, minimal_effect=0.05, chance=None, scale=None)
        assert found.verdict == "yes"
        assert found.difference.low == pytest.approx(0.2)

    def test_false_verdicts_are_rare(self):
        """A true difference of 0 never gives yes, and one of 0.2 never no, in 200 draws of 24 noisy items."""
        generator = np.random.default_rng(4)
        for _ in range(200):
            noise = generator.normal(0.5, 0.1, size=(2, 24))
            assert judge(noise[0], noise[1], noise[1] - 0.4, **RULES).verdict != "yes"
            assert judge(noise[0] + 0.2, noise[1], noise[1] - 0.4, **RULES).verdict != "no"


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.75), (0.5, 0.0, 1.0), (1.0, 0.25, 1.0)])
def test_the_interval_of_a_share_stays_within_shares(share, low, high):
    """The rule of three reaches 3 / n to both sides, and nothing is known below 0 and above 1."""
    interval = _score(np.full(4, share), 1.0)
    assert (interval.mean, interval.low, interval.high) == (share, low, high)
    assert _score(np.array([-3.0, -2.0, -1.0, -2.5]), None).low < 0.0
