"""The statistics of effects: tests against scipy and simulated truth, procedures by hand, and the minimal effect."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from tests.studies.causes.planted import PlantedLM, head, repeated
from tests.studies.causes.test_planted import random_model, random_texts

from sinklab import find_causes
from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.results.intervals import mean_over_items
from sinklab.sinks import Head
from sinklab.studies.causes.effects import Effects, HeadEdit, HeadGroup, one_by_one
from sinklab.studies.causes.labels import (
    SILENCED,
    Evidence,
    benjamini_hochberg,
    contrasts_of,
    evidence_of,
    least_texts,
    minimal_effect_of,
)
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.samples import token_samples

SEEDED = np.random.default_rng(5)


def effects_of(variants: dict[str, np.ndarray], domains: int = 1) -> Effects:
    """Effects ``(heads, texts)`` by name, the same in every domain."""
    loss = np.stack([np.repeat(values[..., None], domains, axis=-1) for values in variants.values()])
    names = tuple(f"domain {number}" for number in range(domains))
    heads = [Head(0, number, "layers.0.self_attn") for number in range(loss.shape[1])]
    return Effects(list(variants), heads, names, loss, np.ones(loss.shape[2:]), "nats")


def test_tails_are_exact_at_any_number_of_texts():
    # Tables of Student's t: 5 % lie above these.
    for texts, t in ((2, 6.3137515), (10, 1.8331129), (1001, 1.6463788)):
        values = SEEDED.normal(size=texts)
        values = 1.0 + (values - values.mean()) / values.std(ddof=1) * np.sqrt(texts) / t
        assert Evidence(values[None], 0.0).p == pytest.approx([max(0.05, 2.0**-texts)], abs=1e-8)


def test_superiority_is_the_t_test_of_scipy_until_the_texts_run_out():
    values = SEEDED.normal(0.03, 0.05, size=(6, 20))
    expected = scipy.stats.ttest_1samp(values, 0.01, axis=1, alternative="greater").pvalue
    np.testing.assert_allclose(Evidence(values, 0.01).p, np.maximum(expected, 2.0**-20), atol=1e-13)
    # Ten texts that agree to the last digit are ten texts.
    assert Evidence(np.full((1, 10), 0.5), 0.01).p == [2.0**-10]
    assert Evidence(np.full((1, 10), 0.005), 0.01).p == [1.0]


def test_texts_without_a_cost_leave_room_for_those_that_were_not_drawn():
    """The rule of three: after n texts without one, a cost of c in one text of 1 / share is not excluded before 3 / share."""
    for texts in (16, 64, 256):
        # 0.7 of the unit is staked on the largest bet, which gains 1 + 0.01 / 0.49 = 1 / 0.98 a text; the rest gains less.
        p = Evidence(np.zeros((1, texts)), 0.01, above=False).p[0]
        assert 0.98**texts < p < min(1.0, 0.98**texts / 0.7)
    # A text that cost 2 nats makes 2 nats the most that one may cost, and there have to be four times as many without.
    once = np.zeros((1, 512))
    without = Evidence(once, 0.01, above=False).p[0]
    once[0, 7] = 2.0
    assert without < 0.001
    assert Evidence(once, 0.01, above=False).p[0] > 0.05


def test_that_it_costs_nothing_is_shown_wrongly_as_seldom_as_it_says():
    """At a mean of exactly the bound: normal effects, seldom ones, and gains that make up for costs."""
    generator, bound, texts, trials = np.random.default_rng(2), 0.01, 300, 2000
    draws = {
        "normal": generator.normal(bound, 0.05, size=(trials, texts)),
        "seldom": 0.5 * (generator.uniform(size=(trials, texts)) < 0.02),
        "exponential": generator.exponential(bound, size=(trials, texts)),
        "gains": np.where(generator.uniform(size=(trials, texts)) < 0.02, -0.48, 0.02),
    }
    for name, values in draws.items():
        assert abs(values.mean() - bound) < 0.002, name
        p = Evidence(values, bound, above=False).p
        for level in (0.2, 0.05, 0.01):
            # Four standard errors of a frequency in 2000 trials.
            assert np.mean(p <= level) <= level + 4 * np.sqrt(level * (1 - level) / trials), name
    # Nor never: at a mean of 0 three hundred texts mostly show it.
    assert np.mean(Evidence(draws["normal"] - bound, bound, above=False).p <= 0.05) > 0.6


def test_all_contrasts_by_hand():
    one, two = np.array([[0.5, 0.7, 0.6]]), np.array([[0.2, 0.3, 0.1]])
    variants = {
        "redirect": one, "hide": 2 * one, "zero": 3 * one, "zero_value": two, "resample": 5 * one, "mean_sink": 6 * one,
    }  # fmt: skip
    found = evidence_of(effects_of(variants), 0, 0.01)
    costs = {**variants, "hide - zero_value": 2 * one - two}
    expected = {**costs, **{f"{name} costs nothing": values for name, values in costs.items()}}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].values, values, atol=1e-15, err_msg=name)
    shown = contrasts_of(found)
    assert shown.keys() == found.keys()
    for name, (contrast,) in shown.items():
        interval = mean_over_items(found[name].values[0])
        assert (contrast.mean, contrast.low, contrast.high) == (interval.mean, interval.low, interval.high), name
        assert contrast.p == found[name].p[0]
    assert shown["redirect"][0].mean == pytest.approx(0.6)
    assert shown["redirect"][0].low < 0.6 < shown["redirect"][0].high


def test_heads_that_were_not_measured_show_nothing_and_take_nothing_from_the_others():
    values = SEEDED.normal(0.03, 0.02, size=(3, 24))
    alone = Evidence(values[:1], 0.01)
    values[1], values[2, 12:] = np.nan, np.nan
    found = evidence_of(effects_of({"redirect": values}), 0, 0.01)["redirect"]
    assert found.p == pytest.approx([alone.p[0], 1.0, Evidence(values[2:, :12], 0.01).p[0]])
    assert found.holds.tolist() == [True, False, True]
    first, missing, last = contrasts_of({"redirect": found})["redirect"]
    assert missing is None
    assert (first.mean, last.mean) == pytest.approx((values[0].mean(), values[2, :12].mean()))


def test_benjamini_hochberg_by_hand():
    p = np.array([[0.001, 0.9], [0.026, 0.022]])
    decided, critical = benjamini_hochberg(p, 0.05)
    # Steps of 0.0125: 0.001 and 0.022 lie below theirs, and 0.026 below 0.0375.
    assert decided.tolist() == [[True, False], [True, True]]
    assert critical == pytest.approx(0.05)
    assert not benjamini_hochberg(np.array([0.03, 0.9]), 0.05)[0].any()
    # The largest one below its step takes all smaller ones with it, though 0.024 lies above its own.
    assert benjamini_hochberg(np.array([0.024, 0.03]), 0.045)[0].all()


def test_benjamini_hochberg_keeps_its_rate():
    """Twenty of a hundred claims are true: of those that are decided, one in twenty may be wrong, times the share of nulls."""
    generator, rates = np.random.default_rng(1), []
    for _ in range(400):
        p = generator.uniform(size=100)
        p[:20] = scipy.stats.norm.sf(generator.normal(3.0, size=20))
        decided, _ = benjamini_hochberg(p, 0.05)
        rates.append(decided[20:].sum() / max(1, decided.sum()))
    # The expectation is 0.05 · 80/100, the standard error of 400 such shares below 0.004.
    assert np.mean(rates) == pytest.approx(0.04, abs=0.016)


def test_texts_that_one_head_needs():
    assert least_texts(1, 0.05) == 5  # 1/32 <= 0.05
    assert least_texts(12 * 3, 0.05) == 10  # 1/1024 <= 0.05 / 36
    assert 2.0 ** -least_texts(1000, 0.01) <= 0.01 / 1000


def test_effects_that_are_not_finite_are_refused():
    effects = effects_of({"redirect": np.zeros((2, 3)), "hide": np.zeros((2, 3))})
    effects.loss[1, 1, 2] = np.inf
    message = r"domain 'domain 0': the loss is not finite under 'hide' on head 0.1 \(1 such effects in all\); run the model in"
    with pytest.raises(MeasurementError, match=message):
        evidence_of(effects, 0, 0.01)


def test_a_domain_of_one_text_is_refused():
    effects = effects_of({"redirect": np.zeros((1, 3))})
    effects.clean_loss[1:] = np.nan
    with pytest.raises(ConfigurationError, match=r"domain 'domain 0': 1 text has scored positions, and intervals need two"):
        evidence_of(effects, 0, 0.01)


def costs_of_all(heads: int, *domains: tuple[float, float], unit: str = "nats", noise: float = 0.3) -> Effects[HeadGroup]:
    """Costs of an output of 0 and of that of another text, of all heads at once, by domain; half as many above as below."""
    spread = noise * np.tile([-1.0, 1.0], 32)
    loss = np.stack([np.stack([mean + spread for mean in how], axis=-1)[None] for how in zip(*domains, strict=True)])
    group = HeadGroup(tuple(Head(layer, 0, f"layers.{layer}") for layer in range(heads)))
    names = tuple(f"domain {number}" for number in range(len(domains)))
    return Effects(list(SILENCED), [group], names, loss, np.ones(loss.shape[2:]), unit)


@pytest.mark.parametrize(
    ("heads", "costs", "expected"),
    [
        (144, (4.0, 5.0), 0.001),  # 4 / 144 / 20 = 0.00139
        (144, (5.0, 4.0), 0.001),  # the lesser of the two
        (12, (2.6, 3.3), 0.01),  # 0.0108, and 0.01 is the most
        (8, (3.44, 2.28), 0.01),
        (40, (3.0, 3.0), 0.004),  # 0.00375
        (1024, (4.0, 4.0), 0.0002),  # a layer each: of more than 64 heads the share of a layer counts
    ],
)
def test_a_twentieth_of_a_fair_share_and_at_most_a_hundredth(heads, costs, expected):
    found = minimal_effect_of(costs_of_all(heads, costs))
    assert (found.value, found.by, found.heads, found.domain) == (expected, "auto", heads, "domain 0")
    assert found.worth["domain 0"]["zero"].mean == pytest.approx(costs[0])


def test_of_several_domains_the_one_on_which_attention_is_worth_most():
    """So that a domain on which the model knows nothing changes nothing."""
    found = minimal_effect_of(costs_of_all(144, (4.0, 5.0), (-1.0, 0.1)))
    assert (found.value, found.domain) == (0.001, "domain 0")


@pytest.mark.parametrize(
    "costs",
    [
        (2.0, 0.0),  # an output of 0 hurts, what is said of another text does not: so it may be with random weights
        (-0.5, 2.0),
        (0.05, 0.06),  # shown, and too little
        (-1.0, -1.0),
    ],
)
def test_where_attention_is_not_shown_to_be_worth_anything(costs):
    found = minimal_effect_of(costs_of_all(144, costs, noise=0.02))
    assert (found.value, found.domain) == (0.01, None)


def test_other_units_have_neither_a_most_nor_a_least():
    assert minimal_effect_of(costs_of_all(2, (40.0, 50.0), unit="squared units")).value == 1.0
    assert minimal_effect_of(costs_of_all(2, (0.004, 0.005), unit="squared units", noise=1e-4)).value == 0.0001
    nothing = minimal_effect_of(costs_of_all(2, (-1.0, 1.0), unit="squared units"))
    assert nothing.value == 0.01


def test_random_weights_keep_the_old_one():
    """At all scales; with both costs above 0 by luck, heads would be labelled by it."""
    edits = [HeadEdit("zero", (ZeroHead(),)), HeadEdit("resample", (ResampleHead(),))]
    everything = HeadGroup(tuple(Head(layer, number) for layer in range(2) for number in range(8)))
    for number, (std, sharp) in enumerate([(0.02, 1.0), (0.1, 1.0), (0.15, 3.0), (0.2, 8.0), (0.3, 1.0), (0.4, 1.0)]):
        samples = token_samples([("random", random_texts(number, structured=number % 2 == 1))])
        model = random_model(("sinklm", "llama")[number % 2], number, std, sharp)
        effects = one_by_one(model, samples, NextToken(), edits, [everything])
        assert minimal_effect_of(effects).domain is None


def test_small_effects_of_many_heads_are_decided(monkeypatch):
    """Sixty-four heads that do the same and each cost 0.002 nats; without all of them it is sixty times that."""
    monkeypatch.setattr("sinklab.results.intervals.RESAMPLES", 200)
    heads = [head(before=40.0, sink=20.0, write=0.28 / 64) for _ in range(64)]
    samples = token_samples([("repeated", repeated(12, 0))])
    model = PlantedLM(heads).eval()
    options = {"samples": samples, "readout": NextToken(), "sink": "none", "heads": "0.0,0.63"}
    auto = find_causes(model, **options).summary
    costs = [one["effects"]["zero"]["repeated"]["mean"] for one in auto["heads"]]
    assert 0.0015 < min(costs) <= max(costs) < 0.0025
    assert auto["minimal_effect"] == auto["minimal_effect_from"]["value"] == 9e-5  # 0.11 / 64 / 20
    assert auto["counts"]["text-dependent"] == 2
    before = find_causes(model, **options, minimal_effect=0.01).summary
    assert before["counts"]["text-dependent"] == 0
    assert (before["minimal_effect"], before["minimal_effect_from"]["by"]) == (0.01, "given")


@pytest.mark.parametrize("goes_with", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("above", [True, False])
def test_a_minimal_effect_from_the_same_texts_makes_no_claim_false_more_often(goes_with, above):
    """Costs that rise or fall, text by text, with what attention is worth there; the minimal effect is not even rounded."""
    generator, share, draws, level = np.random.default_rng(0), 1 / 240, 1000, 0.05
    worth = generator.normal(3.0, 1.5, (draws, 320))
    costs = share * (3.0 + goes_with * (worth - 3.0)) + generator.normal(0.0, 0.5 * share, worth.shape)
    true = share * 3.0  # the mean of the costs, and of the minimal effect
    minimal = share * worth.mean(1)
    p = np.array([Evidence(row[None], bound, above).p[0] for row, bound in zip(costs, minimal, strict=True)])
    wrong = (p <= level) & ((true <= minimal) if above else (true >= minimal))
    # 5 % and twice the standard error of a share of 1,000 draws.
    assert wrong.mean() <= level + 2 * np.sqrt(level * (1 - level) / draws)
