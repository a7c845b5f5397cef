"""Low distortion and the front, on numbers made by hand."""

from __future__ import annotations

import statistics

import pytest

from sinklab_claims.pathways.judging import MARGIN, Summary, compared, judged, pareto, summarised
from sinklab_claims.pathways.runs import FACTORS, Choice

GOOD = {
    "held_out_loss": 2.0,
    "effective_sink_rate": 0.0,
    "sink_rate": 0.0,
    "hidden_ratio": 1.0,
    "window_gap": 0.001,
    "int8_gap": 0.002,
    "distortion": 0.003,
}


def numbers(**rows):
    """Six seeds, the fewest of which anything is said when all are alike; a list gives the values by seed, over and over."""
    return {
        seed: {
            label: {name: value[seed % len(value)] if isinstance(value, list) else value for name, value in row.items()}
            for label, row in rows.items()
        }
        for seed in range(6)
    }


def answer(**changes):
    """The answer for an operation that is good but for the changes, beside a softmax that is not."""
    softmax = {**GOOD, "effective_sink_rate": 40.0, "sink_rate": 40.0, "window_gap": 0.5, "distortion": 0.502}
    rows = judged(["softmax", "other"], numbers(softmax=softmax, other={**GOOD, **changes}))
    return rows[1]


def named(row, verdict):
    """Names of the bounds with a verdict."""
    return [name for name, finding in row.findings.items() if finding.verdict == verdict]


@pytest.mark.parametrize(
    ("column", "value", "name"),
    [
        ("held_out_loss", 2.03, "loss"),
        ("hidden_ratio", 2.5, "activations"),
        ("window_gap", 0.02, "window"),
        ("int8_gap", 0.1, "int8"),
    ],
)
def test_one_that_fails_is_enough(column, value, name):
    row = answer(**{column: value})
    assert row.answer == "no"
    assert named(row, "not reproduced") == [name]
    good = answer()
    assert (good.answer, list(good.findings)) == ("yes", ["loss", "sink", "activations", "window", "int8"])


def test_an_interval_over_the_bound_is_undecided_and_a_failure_outweighs_it():
    # Mean 0.015, standard deviation 0.0089: half the interval is 2.571 · 0.0089 / √6 = 0.0094.
    row = answer(window_gap=[0.005, 0.015, 0.025])
    assert (row.answer, named(row, "inconclusive")) == ("undecided", ["window"])
    assert answer(window_gap=[0.005, 0.015, 0.025], hidden_ratio=20.0).answer == "no"


def test_the_loss_is_compared_by_seed():
    # The losses of single seeds differ by more than the bound; the differences at the same seed do not.
    losses = [2.0, 2.1, 2.2]
    rows = judged(
        ["softmax", "other"],
        numbers(softmax={**GOOD, "held_out_loss": losses}, other={**GOOD, "held_out_loss": [loss + 0.01 for loss in losses]}),
    )
    assert rows[1].findings["loss"].verdict == "reproduced"
    assert rows[1].findings["loss"].mean == pytest.approx(0.01)


def test_a_number_that_is_missing_leaves_it_open():
    assert answer(int8_gap=[0.0, 0.0, 0.0]).answer == "yes"
    found = numbers(softmax=GOOD, other=GOOD)
    del found[1]["other"]["int8_gap"]
    assert judged(["softmax", "other"], found)[1].answer == "undecided"


def test_neither_a_shut_gate_nor_weights_that_are_large_everywhere_are_a_sink():
    """The map points at the first token and the gate lets nothing through; or every key has a half. Both together fail."""
    assert answer(sink_rate=60.0, effective_sink_rate=0.5).answer == "yes"
    assert answer(sink_rate=0.5, effective_sink_rate=60.0).answer == "yes"
    assert named(answer(sink_rate=5.0, effective_sink_rate=60.0), "not reproduced") == ["sink"]


def beside(*losses):
    """The comparison of six seeds whose losses lie above softmax's by so much, over and over."""
    by_seed = [1.9 + 0.05 * seed for seed in range(6)]
    found = {
        seed: {"softmax": {"held_out_loss": own}, "other": {"held_out_loss": own + losses[seed % len(losses)]}}
        for seed, own in enumerate(by_seed)
    }
    return compared("other", found)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        # Standard deviation 0.0089 over six: half of the 90 % interval is 2.015 · 0.0089 / √6 = 0.0074.
        ((-0.01, 0.0, 0.01), "equivalent"),
        ((0.0, 0.01, 0.02), "equivalent"),
        ((0.005, 0.015, 0.025), "undecided"),
        ((0.018, 0.028, 0.038), "worse"),
        ((-0.038, -0.028, -0.018), "better"),
        ((-0.03, -0.02, -0.01), "undecided"),  # lower for certain, and not for certain by what counts
    ],
)
def test_two_one_sided_tests(losses, expected):
    found = beside(*losses)
    assert found.answer == expected
    half = 2.015048 * statistics.stdev([losses[seed % 3] for seed in range(6)]) / 6**0.5
    assert found.interval == pytest.approx((found.mean - half, found.mean + half), rel=1e-5)


def test_an_interval_that_touches_the_margin_is_not_equivalent():
    assert beside(MARGIN).answer == "worse"  # all alike: the interval is a point, and the margin itself is outside
    assert beside(MARGIN - 1e-6).answer == "equivalent"
    two = compared("other", {seed: {"softmax": {"held_out_loss": 2.0}, "other": {"held_out_loss": 2.0}} for seed in range(2)})
    assert (two.answer, two.mean, two.interval) == ("undecided", 0.0, None)  # two seeds are never equivalent


@pytest.mark.parametrize(("lost", "expected"), [(1, "better"), (2, "undecided"), (3, "undecided")])
def test_trainings_that_are_left_do_not_speak_for_more_than_a_quarter_that_diverged(lost, expected):
    found = numbers(softmax=GOOD, other={**GOOD, "held_out_loss": [1.949, 1.95, 1.951]})
    for seed in range(lost):
        del found[seed]["other"]["held_out_loss"]
    row = judged(["softmax", "other"], found)[1]
    assert row.beside is not None
    assert row.beside.answer == expected
    assert row.findings["loss"].verdict == ("reproduced" if expected == "better" else "inconclusive")  # one rule for both


def test_better_only_by_its_rate():
    """At softmax's rate ReLU is worse; at its own it is equal: the row has both, and is judged at its own."""
    relu = {**GOOD, "held_out_loss": 2.0, "scale_rate_loss": 2.2, "tuning_gain": 0.2}
    losses = {factor: {1000: loss} for factor, loss in zip(FACTORS, (2.4, 2.3, 2.2, 2.1, 2.0), strict=True)}
    choices = {"relu": Choice(losses, (1000,))}
    row = judged(["softmax", "relu"], numbers(softmax=GOOD, relu=relu), choices)[1]
    assert row.answer == "yes"
    assert row.beside is not None
    assert row.beside.answer == "equivalent"
    assert row.numbers["chosen_factor"].mean == 4.0
    assert row.numbers["scale_rate_loss"].mean == pytest.approx(2.2)
    assert row.numbers["rate_range"].mean == pytest.approx(0.4)
    assert row.to_dict()["rate"]["end_of_range"] == "highest"


def test_summaries_by_hand():
    found = summarised(
        "a", {0: {"a": {"held_out_loss": 1.0}}, 1: {"a": {"held_out_loss": 2.0}}, 2: {"a": {"held_out_loss": 3.0}}}
    )
    loss = found["held_out_loss"]
    assert (loss.mean, loss.count) == (2.0, 3)
    assert loss.high - loss.mean == pytest.approx(4.302653 / 3**0.5, rel=1e-6)  # Student's t with 2 degrees of freedom
    two = summarised("a", {0: {"a": {"held_out_loss": 1.0}}, 1: {"a": {"held_out_loss": 2.0}}})["held_out_loss"]
    assert (two.mean, two.low, two.high, two.count) == (1.5, None, None, 2)


def test_the_trigger_task_is_counted_and_what_is_proved_has_no_interval():
    found = {
        seed: {
            "softmax": {"trigger_solved": 1.0}, "relu": {"trigger_solved": float(seed > 1)}, "sigmoid": {"trigger_solved": 0.0}
        }
        for seed in range(8)
    }  # fmt: skip
    solved, partly, never = (
        row.numbers["trigger_solved"] for row in judged(["softmax", "relu", "sigmoid"], found, cannot={"sigmoid"})
    )
    assert (solved.mean, solved.low, solved.high) == (1.0, pytest.approx(0.025 ** (1 / 8)), 1.0)  # Clopper and Pearson
    assert (partly.mean, partly.low, partly.high) == (0.75, pytest.approx(0.3491, abs=1e-4), pytest.approx(0.9681, abs=1e-4))
    assert never == Summary(0.0, None, None, 8)


def test_the_front_by_hand():
    points = {"a": (1.0, 5.0), "b": (2.0, 2.0), "c": (3.0, 1.0), "beaten": (3.0, 2.0), "last": (4.0, 4.0)}
    assert pareto(points) == ["a", "b", "c"]
    assert pareto({"a": (1.0, 1.0), "b": (1.0, 1.0), "c": (1.0, 2.0)}) == ["a", "b"]  # equal points stay both
    softmax = {**GOOD, "held_out_loss": 1.9, "distortion": 0.5}
    rows = judged(["softmax", "good", "bad"], numbers(softmax=softmax, good=GOOD, bad={**GOOD, "distortion": 0.6}))
    assert [row.best for row in rows] == [True, True, False]
    assert "loss" not in rows[0].findings  # softmax is not compared with itself
    assert rows[0].beside is None


def test_the_trainings_that_did_not_diverge_put_no_operation_on_the_front():
    softmax = {**GOOD, "held_out_loss": 1.9, "distortion": 0.5}
    for lost, best in ((1, [False, True]), (2, [True, False])):
        found = numbers(softmax=softmax, lucky={**softmax, "held_out_loss": 1.8, "distortion": 0.1})
        for seed in range(lost):
            found[seed]["lucky"] = {}
        assert [row.best for row in judged(["softmax", "lucky"], found)] == best
