"""Labels from made-up effects: every rule, every claim of a rule, the error rate, and how many texts it takes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.labels import RULES, label_heads, require_texts, texts_needed
from sinklab.studies.causes.samples import token_samples

VARIANTS = ["redirect", "hide", "zero", "zero_value", "hide control 0", "hide control 1", *(f"rotated {k}" for k in range(8))]

SEMANTIC = {"redirect": 0.3, "zero": 0.3, "rotated": 0.6}
DORMANT = {"hide": 0.2}
BROADCAST = {"zero_value": 0.2, "hide": 0.3, "zero": 0.3, "rotated": 0.5}
NOTHING: dict[str, float] = {}


def sink_of(heads: int, place=0) -> Sinks:
    numbers = np.full(heads, 0.5)
    sinks = Sinks.at(place)
    found = tuple(Head(0, head, "attention") for head in range(heads))
    return dataclasses.replace(sinks, heads=found, weights=numbers, value_ratio=numbers, length=16)


def made_up(heads: list[list[dict[str, float]]], *, texts: int = 16, noise: float = 0.002, seed: int = 0) -> Effects:
    """Effects with given means by head, domain and variant (0 where not given), and normal noise over texts and rotations."""
    generator = np.random.default_rng(seed)
    loss = generator.normal(0.0, noise, size=(len(VARIANTS), len(heads), texts, len(heads[0])))
    for place, domains in enumerate(heads):
        for domain, means in enumerate(domains):
            for number, variant in enumerate(VARIANTS):
                rotated = variant.startswith("rotated")
                mean = means.get("rotated" if rotated else variant, 0.0)
                loss[number, place, :, domain] += mean * (1 + 0.1 * generator.normal()) if rotated else mean
    names = tuple(f"domain {number}" for number in range(len(heads[0])))
    listed = [Head(0, number, "attention") for number in range(len(heads))]
    return Effects(VARIANTS, listed, names, loss, np.abs(loss), np.full((texts, len(names)), 2.0), "nats")


def labels(heads, **settings) -> list[str]:
    return [found.label for found in label_heads(made_up(heads, **settings), sink_of(len(heads)))]


def test_each_rule_gives_its_label():
    heads = [[SEMANTIC], [DORMANT], [BROADCAST], [NOTHING], [{name: -value for name, value in SEMANTIC.items()}]]
    assert labels(heads) == ["semantic", "dormant", "broadcast", "undecided", "undecided"]


def test_a_value_that_does_harm_is_not_needed():
    assert labels([[{**DORMANT, "zero_value": -0.05}], [{**BROADCAST, "zero_value": -0.05}]]) == ["dormant", "dormant"]


def test_over_domains():
    heads = [
        [SEMANTIC, SEMANTIC, SEMANTIC],
        [SEMANTIC, DORMANT, DORMANT],
        [DORMANT, DORMANT, DORMANT],
        [SEMANTIC, DORMANT, NOTHING],
        [SEMANTIC, BROADCAST, SEMANTIC],
        [BROADCAST, BROADCAST, BROADCAST],
    ]
    found = label_heads(made_up(heads), sink_of(6))
    assert [one.label for one in found] == ["semantic", "switch", "dormant", "undecided", "undecided", "broadcast"]
    assert found[3].by_domain == {"domain 0": "semantic", "domain 1": "dormant", "domain 2": "undecided"}


@pytest.mark.parametrize(
    ("means", "changed"),
    [
        (SEMANTIC, {"redirect": 0.0}),  # the sink says what the head says
        (SEMANTIC, {"zero": 0.0}),  # writing the value of the sink hurts, and saying nothing does not
        (SEMANTIC, {"rotated": 0.0}),  # any other direction would do as well
        (SEMANTIC, {"redirect": 0.008, "zero": 0.008}),  # less than the minimal effect
        (DORMANT, {"redirect": 0.05}),
        (DORMANT, {"redirect": -0.05}),
        (DORMANT, {"zero_value": 0.05, "rotated": 0.0}),
        (DORMANT, {"hide control 0": 0.2, "hide control 1": 0.2}),  # any key is missed as much
        (DORMANT, {"hide": 0.008}),
        (BROADCAST, {"redirect": 0.05, "rotated": 0.0}),
        (BROADCAST, {"rotated": 0.0}),
    ],
)
def test_no_label_without_one_of_its_claims(means, changed):
    assert labels([[means]]) != ["undecided"]
    assert labels([[{**means, **changed}]]) == ["undecided"]


def test_without_a_sink_zeroing_decides():
    effects = made_up([[SEMANTIC], [{**SEMANTIC, "rotated": 0.0}], [DORMANT]])
    found = label_heads(effects, sink_of(3, place=None))
    assert [one.label for one in found] == ["semantic", "undecided", "undecided"]
    assert set(found[0].p["domain 0"]) == {"semantic"}


def test_evidence_is_all_there_and_fits_into_json():
    (found,) = label_heads(made_up([[SEMANTIC, DORMANT]]), sink_of(1))
    told = json.loads(json.dumps(found.to_dict()))
    assert told["head"] == "0.0"
    assert told["label"] == "switch"
    assert {name for rule in RULES.values() for name in rule} <= set(told["evidence"])
    redirect = told["evidence"]["redirect"]["domain 0"]
    assert redirect["low"] < redirect["mean"] < redirect["high"]
    assert redirect["mean"] == pytest.approx(0.3, abs=0.002)  # noise of 0.002 over 16 texts
    for rule, names in RULES.items():
        assert told["p"]["domain 0"][rule] == max(told["evidence"][name]["domain 0"]["p"] for name in names)


def test_texts_that_lack_a_domain_are_left_out():
    effects = made_up([[SEMANTIC, DORMANT]], texts=32)
    for array in (effects.loss, effects.divergence):
        array[..., :16, 1] = np.nan
    effects.clean_loss[:16, 1] = np.nan
    (found,) = label_heads(effects, sink_of(1))
    assert found.label == "switch"


# --- error rate -------------------------------------------------------------------------------------------------------------


def test_effects_at_the_edge_of_every_claim_give_a_label_as_seldom_as_asked(monkeypatch):
    """Claims that are all just false: means at the minimal effect, rotated copies around 0. Any label is false."""
    monkeypatch.setattr("sinklab.results.intervals.RESAMPLES", 10)  # intervals play no part
    edge = [{"redirect": 0.01, "zero": 0.01, "zero_value": 0.01}, {"hide": 0.01}, {"zero_value": 0.01, "zero": 0.01}]
    wrong = 0
    for seed in range(300):
        effects = made_up([[edge[number % 3]] for number in range(6)], seed=seed, noise=0.01)
        wrong += any(found.label != "undecided" for found in label_heads(effects, sink_of(6)))
    # The chance of any label in a run is at most 0.05; four standard errors of 300 runs are 0.05.
    assert wrong / 300 <= 0.10


def test_the_error_rate_is_that_of_all_heads_together():
    """The same evidence is enough for one head and not for one among many that show nothing."""
    means = [SEMANTIC]
    alone = made_up([means], texts=16, noise=0.3, seed=0)
    (found,) = label_heads(alone, sink_of(1))
    assert found.label == "semantic"
    assert 0.05 / (40 * 3) < found.p["domain 0"]["semantic"] < 0.05 / 3
    many = made_up([means, *[[NOTHING]] * 39], texts=16, noise=0.3, seed=0)
    many.loss[:, :1] = alone.loss
    assert label_heads(many, sink_of(40))[0].label == "undecided"


# --- numbers of texts -------------------------------------------------------------------------------------------------------


def test_too_few_texts_are_refused_with_the_number_that_would_do():
    heads = [[SEMANTIC]] * 4  # 12 hypotheses: 2^-8 < 0.05 / 12 < 2^-7
    message = (
        r"7 texts of domain 'domain 0' are too few: 12 hypotheses \(4 heads, 1 domains, 3 labels\) at an error rate of 0.05 "
        r"ask for p-values down to 4.2e-03, and so many texts give 7.8e-03 at best; take 8 texts or more"
    )
    with pytest.raises(ConfigurationError, match=message):
        labels(heads, texts=7)
    assert labels(heads, texts=8) == ["semantic"] * 4


def test_and_before_anything_is_measured():
    samples = token_samples([("a", torch.zeros(16, 5, dtype=torch.int64)), ("b", torch.zeros(7, 5, dtype=torch.int64))])
    sink = sink_of(4)
    with pytest.raises(ConfigurationError, match=r"7 texts of domain 'b' are too few: 24 hypotheses .* take 9 texts or more"):
        require_texts(samples, sink, sink.heads)
    require_texts(samples, sink_of(4, place=None), sink.heads[:1], level=0.2)


def test_texts_needed_would_decide_half_of_what_texts_can_decide():
    heads = [[SEMANTIC], [DORMANT], [{"redirect": 0.2, "zero": 0.25, "rotated": 0.5}], [NOTHING]]
    effects = made_up(heads, noise=0.6, seed=1)
    before = [found.label for found in label_heads(effects, sink_of(4))]
    assert before == ["undecided"] * 4
    needed = texts_needed(effects, sink_of(4))
    assert needed is not None
    assert 40 < needed < 5000
    found = [one.label for one in label_heads(made_up(heads, texts=2 * needed, noise=0.6, seed=2), sink_of(4))]
    assert sum(label != "undecided" for label in found) >= 1


def test_no_texts_are_needed_where_they_would_not_help():
    assert texts_needed(made_up([[SEMANTIC], [DORMANT]]), sink_of(2)) is None  # all are decided
    # A direction that means nothing, and an effect that is none: more texts would show just that.
    assert texts_needed(made_up([[{**SEMANTIC, "rotated": 0.0}], [{"redirect": -0.2}]]), sink_of(2)) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": 0.0}, r"level 0 must lie between 0 and 1"),
        ({"level": 1.5}, r"level 1.5 must lie between 0 and 1"),
        ({"minimal_effect": 0.0}, r"minimal effect 0 must be above 0: no effect can be shown to be none"),
        ({"minimal_effect": float("nan")}, r"minimal effect nan must be above 0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        label_heads(made_up([[SEMANTIC]]), sink_of(1), **settings)


def test_variants_that_were_not_measured():
    effects = made_up([[SEMANTIC]])
    some = Effects(
        ["zero"], effects.heads, effects.domain_names, effects.loss[2:3], effects.loss[2:3], effects.clean_loss, "nats"
    )
    with pytest.raises(
        ConfigurationError, match=r"no evidence for 'redirect': measured were zero; take those of make_variants"
    ):
        label_heads(some, sink_of(1))
