"""The statistics of effects: tests against scipy and simulated truth, procedures by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.stats

from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.results.intervals import mean_over_items, means_over_items
from sinklab.sinks import Head
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.evidence import Evidence, benjamini_hochberg, evidence_of, least_texts

SEEDED = np.random.default_rng(5)


def effects_of(variants: dict[str, np.ndarray], domains: int = 1) -> Effects:
    """Effects ``(heads, texts)`` by name, the same in every domain."""
    loss = np.stack([np.repeat(values[..., None], domains, axis=-1) for values in variants.values()])
    names = tuple(f"domain {number}" for number in range(domains))
    heads = [Head(0, number, "layers.0.self_attn") for number in range(loss.shape[1])]
    return Effects(list(variants), heads, names, loss, np.abs(loss), np.ones(loss.shape[2:]), "nats")


def beyond_rotated(rotated: np.ndarray) -> Evidence:
    """That effects ``(K, heads)`` of rotated copies, the same in each of 20 texts, lie above 0."""
    return Evidence(rotated.mean(0)[:, None].repeat(20, 1), 0.0, rotated=rotated[..., None].repeat(20, 2))


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


def test_equivalence_is_two_one_sided_tests():
    values = SEEDED.normal(0.002, 0.006, size=(4, 12))
    found = evidence_of(effects_of({"redirect": values}), 0, 0.01)["redirect is nothing"]
    upper = scipy.stats.ttest_1samp(values, 0.01, axis=1, alternative="less").pvalue
    lower = scipy.stats.ttest_1samp(values, -0.01, axis=1, alternative="greater").pvalue
    np.testing.assert_allclose(found.p, np.maximum(np.maximum(upper, lower), 2.0**-12), atol=1e-13)
    np.testing.assert_allclose(found.p_of_texts(12), found.p, atol=1e-15)
    assert (found.p_of_texts(40) <= found.p).all()


def test_all_contrasts_by_hand():
    one, two = np.array([[0.5, 0.7, 0.6]]), np.array([[0.2, 0.3, 0.1]])
    found = evidence_of(
        effects_of(
            {
                "redirect": one,
                "hide": 2 * one,
                "zero": 3 * one,
                "zero_value": two,
                "hide control 0": two,
                "hide control 1": 3 * two,
                "redirect control 0": 4 * one,
                "redirect control 1": 2 * one,
                "redirect rotated 0": two,
                "redirect rotated 1": two,
                "rotated 0": one,
                "rotated 1": 3 * one,
            }
        ),
        0,
        0.01,
    )
    expected = {
        "redirect": one,
        "redirect is nothing": one,
        "hide": 2 * one,
        "zero": 3 * one,
        "zero_value": two,
        "zero_value costs nothing": two,
        "rotated": 2 * one,
        "redirect - rotated": one - two,
        "hide - control": 2 * one - 2 * two,
        "redirect control - redirect": 2 * one,
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].values, values, atol=1e-15, err_msg=name)
    interval = found["redirect"].contrasts()[0].interval
    assert interval.mean == pytest.approx(0.6)
    assert interval.low < 0.6 < interval.high


def test_intervals_of_many_rows_are_those_of_each(monkeypatch):
    monkeypatch.setattr("sinklab.results.intervals.ROWS", 3)
    rows = SEEDED.normal(size=(7, 12)) * np.array([[1.0], [0.0], [1e-6], [5.0], [1.0], [1.0], [1.0]])
    for row, interval in zip(rows, means_over_items(rows, scale=1.0), strict=True):
        one = mean_over_items(row, scale=1.0)
        # Means of the same draws, added up in another order.
        assert dataclasses.astuple(interval) == pytest.approx(dataclasses.astuple(one), rel=1e-12, abs=1e-15)


def test_more_texts_shrink_what_texts_spread_and_not_what_directions_do():
    own = 0.4 + 0.1 * np.array([-1.0, 1.0, -1.0, 1.0])[:, None, None]
    noise = np.random.default_rng(0).normal(0.0, 0.6, size=(4, 1, 9))
    for rotated, gained in ((own + noise, True), (own + 0 * noise, False)):
        effects = effects_of({f"rotated {number}": values for number, values in enumerate(rotated)})
        found = evidence_of(effects, 0, 0.01)["rotated"]
        few, many = found.p_of_texts(9)[0], found.p_of_texts(10**6)[0]
        assert found.p[0] == few
        assert (many < 0.9 * few) == gained
    # Four copies 0.1 off their mean of 0.4, and no noise: a spread of 0.2 / sqrt(3), and t = 0.4 / (spread · sqrt(5/4)).
    assert many == pytest.approx(scipy.stats.t.sf(0.4 / np.sqrt(0.04 / 3 * 1.25), 3), rel=1e-9)


def test_rotated_controls_are_the_random_unit():
    """One against two rotated copies: distance 2, spread sqrt(2), so t = 2 / (sqrt(2) sqrt(3/2)) with one degree of freedom."""
    assert beyond_rotated(np.array([[1.0], [3.0]])).p == pytest.approx(scipy.stats.t.sf(2 / np.sqrt(3), 1), abs=1e-13)
    rotated = np.array([[0.9, 0.9], [1.1, 1.1]])
    few = effects_of({"rotated 0": rotated[:1].T.repeat(5, 1), "rotated 1": rotated[1:].T.repeat(5, 1)})
    many = effects_of({"rotated 0": rotated[:1].T.repeat(500, 1), "rotated 1": rotated[1:].T.repeat(500, 1)})
    p = [evidence_of(effects, 0, 0.01)["rotated"].p[0] for effects in (few, many)]
    # Two copies with effects 0.9 and 1.1, in five texts or five hundred: spread sqrt(0.02).
    assert p == pytest.approx([scipy.stats.t.sf(1 / np.sqrt(0.02 * 1.5), 1)] * 2, abs=1e-13)


def test_a_direction_that_means_nothing_wins_as_often_as_it_should():
    """Losses of a random reader of random outputs, real and rotated: p-values are at most as often small as they say."""
    generator, size, count, trials = np.random.default_rng(0), 16, 12, 2000
    rotations = [np.linalg.qr(generator.normal(size=(size, size)))[0] for _ in range(count)]
    outputs, readers = generator.normal(size=(2, trials, 6, size))  # six queries a trial
    reads = [np.einsum("nqd,nqd->n", outputs @ rotation, readers) for rotation in (np.eye(size), *rotations)]
    # A loss that is neither linear nor symmetric in what is read.
    losses = [np.logaddexp(0.0, 0.1 * read) for read in reads]
    p = beyond_rotated(np.stack(losses[1:]) - losses[0]).p
    for level in (0.2, 0.05, 0.01):
        # Four standard errors of a frequency in 2000 trials.
        assert np.mean(p <= level) <= level + 4 * np.sqrt(level * (1 - level) / trials)
    assert np.mean(p <= 0.2) > 0.1


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
    with pytest.raises(ConfigurationError, match=r"domain 'domain 0': 1 texts have scored positions, and intervals need two"):
        evidence_of(effects, 0, 0.01)
