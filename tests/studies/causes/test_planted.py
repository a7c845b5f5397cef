"""Labels where the truth is known: hand-set weights say what every head is for, and the labels must say the same."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.studies.causes.planted import planted, sinks_of

from sinklab.errors import ConfigurationError
from sinklab.results.store import Store
from sinklab.studies.causes import resumable
from sinklab.studies.causes.effects import make_variants
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.labels import _candidates, _where_it_rests, label_heads, switches_within
from sinklab.studies.causes.measurement import examine
from sinklab.studies.causes.readout import NextToken, SquaredError
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.texts import Texts

NAMES = ("trigger", "induction", "two domains", "broadcast", "constant", "key bias", "sigmoid")


@pytest.fixture(autouse=True, scope="module")
def _few_resamples():
    """Intervals decide nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinklab.results.intervals.RESAMPLES", 100)
        yield


@functools.cache
def labelled(name, seed, *, budget="fast", noise=0.0):
    known = planted(name, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in known.model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    sink = sinks_of(known.model, known.samples, **({"place": None} if name == "sigmoid" else {}))
    readout = SquaredError() if name == "trigger" else NextToken()
    variants = make_variants(sink, known.samples, budget=budget, seed=seed)
    effects = measure_effects(known.model, known.samples, readout, variants, sink.heads, batch_size=64)
    return known, sink, label_heads(effects, sink)


@pytest.mark.parametrize("name", NAMES)
def test_every_head_gets_the_label_that_was_planted(name):
    known, sink, labels = labelled(name, 0)
    assert (sink.main and sink.main.place) == known.place
    assert [label.label for label in labels] == known.labels


def test_and_so_it_does_with_the_full_budget():
    known, _, labels = labelled("constant", 7, budget="full")
    assert [label.label for label in labels] == known.labels
    assert {"mean", "rotated", "redirect control - redirect"} <= set(labels[0].effects)


@pytest.mark.parametrize("name", ["trigger", "broadcast", "key bias"])
def test_noise_on_the_weights_makes_no_label_wrong(name):
    """Heads are less and less what they were: they may become undecided, and must not become something else."""
    known, _, labels = labelled(name, 0, noise=0.03)
    found = [label.label for label in labels]
    assert all(label in (true, "undecided") for label, true in zip(found, known.labels, strict=True)), found
    assert found[0] == known.labels[0]


def test_a_switch_is_told_by_its_domains():
    _, _, (label,) = labelled("trigger", 0)
    assert label.domains == {"other": "dormant", "trigger": "semantic"}
    _, _, labels = labelled("two domains", 0)
    assert labels[0].domains == {"repeated": "semantic", "fresh": "dormant"}
    assert labels[1].domains == {"repeated": "dormant", "fresh": "dormant"}


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


def test_which_heads_need_their_sink():
    """A no-op does, and so does a head that speaks at some queries; not one whose sink speaks, nor one that nobody reads."""
    found = {name: [label.needs_sink for label in labelled(name, 0)[2]] for name in ("induction", "broadcast", "two domains")}
    assert found["induction"] == [{"repeated": needs} for needs in ("yes", "yes", "no")]
    assert found["broadcast"] == [{"drawn": needs} for needs in ("no", "no")]
    assert found["two domains"][1] == {"repeated": "yes", "fresh": "yes"}
    assert labelled("sigmoid", 0)[2][0].needs_sink == {}


def test_a_switch_within_a_text_is_found():
    """The induction head speaks in the second half of a text and rests in the first; the no-op rests always."""
    known, sink, labels = labelled("induction", 0)
    variants, heads = make_variants(sink, known.samples), _candidates(labels, sink, known.samples, 0.05)
    assert heads == [labels[0].head]  # the others are silent everywhere
    (rests,) = _where_it_rests(known.model, known.samples, sink, heads, batch_size=64)
    # Words 1 to 11 come for the first time, 12 to 22 again; the last one has no target.
    assert bool(rests[:, 1:12].all())
    assert not rests[:, 12:].any()

    def measure(halves):
        return {
            head: measure_effects(known.model, parted, NextToken(), variants, [head], batch_size=64)
            for head, parted in halves.items()
        }

    found = switches_within(known.model, known.samples, sink, labels, measure, level=0.05, minimal_effect=0.01, batch_size=64)
    assert found[0].within == {"repeated": {"at rest": "dormant", "elsewhere": "semantic"}}
    assert [label.label for label in found] == ["switch", "dormant", "unneeded"]
    assert found[1:] == labels[1:]


def test_what_is_looked_at_within_texts_is_kept(tmp_path, monkeypatch):
    """It takes a head as long again as all its edits, so that a run that is killed behind it does not begin anew."""
    known, _, _ = labelled("induction", 0)
    texts, request, measured = Texts(known.samples, NextToken(), []), Request(minimal_effect=0.01), []
    real = resumable.measure_effects

    def counted(model, samples, readout, variants, heads, **options):
        measured.append((len(samples.domain_names), [head.head for head in heads]))
        return real(model, samples, readout, variants, heads, **options)

    monkeypatch.setattr(resumable, "measure_effects", counted)
    asked = {"identity": {"operation": "softmax"}, "store": Store(tmp_path)}
    found = examine(known.model, texts, request, **asked)
    assert found.found.heads[0].within == {"repeated": {"at rest": "dormant", "elsewhere": "semantic"}}
    assert measured == [(1, [0, 1, 2]), (2, [0])]
    again = examine(known.model, texts, request, **asked)
    assert again.found == found.found
    assert len(measured) == 2, "all of it was kept"
