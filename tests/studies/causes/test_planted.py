"""Labels where the truth is known: hand-set weights say what every head is for, and the labels must say the same."""

from __future__ import annotations

import pytest
import torch
from tests.studies.causes.planted import planted, sinks_of

from sinklab.errors import ConfigurationError
from sinklab.studies.causes.effects import one_by_one
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.labels import label_heads
from sinklab.studies.causes.readout import NextToken, SquaredError
from sinklab.studies.causes.variants import make_variants

NAMES = ("trigger", "induction", "two domains", "broadcast", "key bias", "sigmoid")


def labelled(name, seed, *, measure=measure_effects, budget="fast", noise=0.0):
    known = planted(name, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in known.model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    sink = sinks_of(known.model, known.samples, **({"place": None} if name == "sigmoid" else {}))
    readout = SquaredError() if name == "trigger" else NextToken()
    variants = make_variants(sink, known.samples, budget=budget, seed=seed)
    return known, sink, label_heads(measure(known.model, known.samples, readout, variants, sink.heads), sink)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_every_head_gets_the_label_that_was_planted(name, seed):
    known, sink, labels = labelled(name, seed)
    assert (sink.main and sink.main.place) == known.place
    assert [label.label for label in labels] == known.labels


@pytest.mark.parametrize("name", NAMES)
def test_and_so_it_does_one_head_at_a_time_with_the_full_budget(name):
    known, _, labels = labelled(name, 7, measure=one_by_one, budget="full")
    assert [label.label for label in labels] == known.labels


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_noise_on_the_weights_makes_no_label_wrong(name, noise):
    """Heads are less and less what they were: they may become undecided, and must not become something else."""
    known, _, labels = labelled(name, 0, noise=noise)
    found = [label.label for label in labels]
    assert all(label in (true, "undecided") for label, true in zip(found, known.labels, strict=True)), found
    assert noise > 0.05 or found[0] == known.labels[0]


def test_a_switch_is_told_by_its_domains():
    _, _, (label,) = labelled("trigger", 0)
    assert label.by_domain == {"other": "dormant", "trigger": "semantic"}
    _, _, labels = labelled("two domains", 0)
    assert labels[0].by_domain == {"repeated": "semantic", "fresh": "dormant"}
    assert labels[1].by_domain == {"repeated": "dormant", "fresh": "dormant"}


def test_value_norms_part_a_broadcast_from_a_no_op():
    _, sink, _ = labelled("broadcast", 0)
    # Values of all tokens have length 1, that of BOS too.
    assert sink.value_ratio[0] == pytest.approx(1.0, abs=1e-12)
    _, sink, _ = labelled("induction", 0)
    assert (sink.value_ratio == 0).all()


def test_the_key_bias_is_the_sink_and_position_0_is_not():
    known = planted("key bias", 0)
    sink = sinks_of(known.model, known.samples)
    assert sink.main.place == "null"
    tried = dict(sink.tried)
    assert tried["null"] > 0.99
    assert tried[0] < 0.3


def test_a_sigmoid_model_has_no_sink():
    known = planted("sigmoid", 0)
    with pytest.raises(
        ConfigurationError, match=r"no sink found: no head gives any place a mean weight of 0.3; tried, .* position 2 \(0\.09\)"
    ):
        sinks_of(known.model, known.samples).require()


def test_at_the_optimum_all_changes_of_one_size_cost_the_same():
    """Why labels do not rest on rotated changes: the answer of the trigger model is exact, and its error a square."""
    label = labelled("trigger", 0)[2][0]
    real, apart = label.evidence["redirect"]["trigger"], label.evidence["redirect - rotated"]["trigger"]
    assert real.interval.mean > 0.05
    assert abs(apart.interval.mean) < 1e-3 * real.interval.mean
