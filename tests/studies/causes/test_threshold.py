"""The minimal effect that scales with the model: its rule, when it is not taken, what it decides, that it biases nothing."""

from __future__ import annotations

import numpy as np
import pytest
from tests.studies.causes.planted import MANY, PlantedLM, head, induction, repeated
from tests.studies.causes.test_random_models import random_model, texts

from sinklab import find_causes
from sinklab.errors import ConfigurationError
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.sinks import Head
from sinklab.studies.causes.effects import Effects, HeadEdit, HeadGroup, one_by_one
from sinklab.studies.causes.evidence import SILENCED, Evidence, minimal_effect_of
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.samples import token_samples


def effects_of(heads: int, *domains: tuple[float, float], unit: str = "nats", noise: float = 0.3) -> Effects[HeadGroup]:
    """Costs of an output of 0 and of that of another text, of all heads at once, by domain; half as many above as below."""
    spread = noise * np.tile([-1.0, 1.0], 32)
    loss = np.stack([np.stack([mean + spread for mean in how], axis=-1)[None] for how in zip(*domains, strict=True)])
    group = HeadGroup(tuple(Head(layer, 0, f"layers.{layer}") for layer in range(heads)))
    names = tuple(f"domain {number}" for number in range(len(domains)))
    return Effects(list(SILENCED), [group], names, loss, np.abs(loss), np.ones(loss.shape[2:]), unit)


@pytest.mark.parametrize(
    ("heads", "costs", "expected"),
    [
        (144, (4.0, 5.0), 0.001),  # 4 / 144 / 20 = 0.00139
        (144, (5.0, 4.0), 0.001),  # the lesser of the two
        (12, (2.6, 3.3), 0.01),  # 0.0108, and 0.01 is the most
        (8, (3.44, 2.28), 0.01),
        (40, (3.0, 3.0), 0.004),  # 0.00375
        (1024, (4.0, 4.0), 0.0002),
    ],
)
def test_a_twentieth_of_a_fair_share_and_at_most_a_hundredth(heads, costs, expected):
    found = minimal_effect_of(effects_of(heads, costs))
    assert (found.value, found.by, found.heads, found.domain) == (expected, "auto", heads, "domain 0")
    assert found.worth["domain 0"]["zero"].mean == pytest.approx(costs[0])


def test_of_several_domains_the_one_on_which_attention_is_worth_most():
    """So that a domain on which the model knows nothing changes nothing."""
    found = minimal_effect_of(effects_of(144, (4.0, 5.0), (-1.0, 0.1)))
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
    found = minimal_effect_of(effects_of(144, costs, noise=0.02))
    assert (found.value, found.domain) == (0.01, None)


def test_other_units_have_neither_a_most_nor_a_least():
    assert minimal_effect_of(effects_of(2, (40.0, 50.0), unit="squared units")).value == 1.0
    assert minimal_effect_of(effects_of(2, (0.004, 0.005), unit="squared units", noise=1e-4)).value == 0.0001
    nothing = minimal_effect_of(effects_of(2, (-1.0, 1.0), unit="squared units"))
    assert nothing.value == 0.01


def test_random_weights_keep_the_old_one():
    """At all scales; with both costs above 0 by luck, heads would be labelled by it."""
    edits = [HeadEdit("zero", (ZeroHead(),)), HeadEdit("resample", (ResampleHead(),))]
    everything = HeadGroup(tuple(Head(layer, number) for layer in range(2) for number in range(8)))
    for number, (std, sharp) in enumerate([(0.02, 1.0), (0.1, 1.0), (0.15, 3.0), (0.2, 8.0), (0.3, 1.0), (0.4, 1.0)]):
        samples = token_samples([("random", texts(number, structured=number % 2 == 1))])
        model = random_model(("sinklm", "llama")[number % 2], number, std, sharp)
        effects = one_by_one(model, samples, NextToken(), edits, [everything])
        assert minimal_effect_of(effects).domain is None


def test_small_effects_of_many_heads_are_decided(monkeypatch):
    """Sixty-four heads that do the same and each cost 0.002 nats; without all of them it is sixty times that."""
    monkeypatch.setattr("sinklab.results.intervals.RESAMPLES", 200)
    heads = [head(before=40.0, sink=20.0, write=0.28 / 64) for _ in range(64)]
    samples = token_samples([("repeated", repeated(12, 0))])
    model = PlantedLM(heads).eval()
    options = {"samples": samples, "readout": NextToken(), "sink": "none", "experiments": False, "heads": "0.0,0.63"}
    auto = find_causes(model, **options).summary
    costs = [one["effects"]["zero"]["repeated"]["mean"] for one in auto["heads"]]
    assert 0.0015 < min(costs) <= max(costs) < 0.0025
    assert auto["minimal_effect"] == auto["minimal_effect_from"]["value"] == 9e-5  # 0.11 / 64 / 20
    assert auto["counts"]["semantic"] == 2
    before = find_causes(model, **options, minimal_effect=0.01).summary
    assert before["counts"]["semantic"] == 0
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


def test_what_it_may_be():
    with pytest.raises(ConfigurationError, match="`minimal_effect` small must be auto or above 0"):
        Request(minimal_effect="small")
    assert Request(minimal_effect=1e-6).minimal_effect == 1e-6


def test_labels_of_small_models_stay(monkeypatch):
    monkeypatch.setattr("sinklab.results.intervals.RESAMPLES", 200)
    samples = token_samples([("repeated", repeated(MANY, 0))])
    found = find_causes(
        PlantedLM([induction()]).eval(), samples=samples, readout=NextToken(), experiments=False, batch_size=144
    ).summary
    assert found["minimal_effect"] == 0.01
    assert found["minimal_effect_from"]["by"] == "auto"
