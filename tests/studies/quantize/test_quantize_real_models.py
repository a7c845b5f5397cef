"""Spikes of checkpoints that others trained, against what independent code found; skipped where the checkpoints are not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.conftest import real

from sinklab.corpora import resolve_corpus
from sinklab.corpora.samples import Samples
from sinklab.models.loading import load_model
from sinklab.studies.quantize.cures import find_spikes
from sinklab.studies.quantize.quantize import quantize
from sinklab.studies.quantize.twin import Scheme, Treatment, Twin

pytestmark = pytest.mark.real


def test_the_neuron_that_writes_a_vits_spike_is_found_at_the_corner_patches():
    """Known from independent code: neuron 417 of block 7, at patches 1, 14, 183 and 196."""
    model = load_model(str(real("vit-tiny-patch16-224"))).model
    # Smooth pictures: the spikes stand there whatever is shown.
    generator = torch.Generator().manual_seed(0)
    pictures = torch.nn.functional.interpolate(2 * torch.rand(3, 3, 7, 7, generator=generator) - 1, size=224, mode="bicubic")
    samples = Samples({"pixel_values": pictures}, kind="image")
    twin = Twin(model)
    spike = find_spikes(twin, samples, twin.ranges(samples), 8)["vit.layers.7.mlp.fc2"]
    assert (spike.large, spike.channel) == (True, 417)
    assert set(spike.positions) <= {1, 14, 183, 196}


def test_the_spike_of_a_llama_is_the_neuron_that_writes_its_sink():
    summary = quantize(str(real("tiny1m")), schemes=["w8a8"], samples=8, calibration=8, minimal_effect=10.0).summary
    spike = summary["largest_spike"]
    assert (spike["site"], spike["channel"], spike["positions"]) == ("model.layers.0.mlp.down_proj", 233, [0])
    assert spike["at_sink"]
    assert summary["sinks"] == [0]


def test_eight_bits_of_a_language_model_break_on_its_first_token():
    """SmolLM2-135M, known from independent code: static scales cost 0.5 to 0.65 nats, scales by token next to nothing, and the
    first token in full precision takes most of the cost and of the largest activation away."""
    loaded = load_model(str(real("smollm2-135m")), dtype="float32")
    drawn = resolve_corpus("python_source").sample(loaded.encoder, seq_len=64, samples=16, seed=0, bos=False)
    ranges_from, measured = Samples.of_tokens(drawn[:8]), Samples.of_tokens(drawn[8:])
    twin = Twin(loaded.model)
    ranges, without = twin.ranges(ranges_from), twin.ranges(ranges_from, (0,))
    assert max(float(one.high.max()) for one in ranges.values()) > 1000
    assert max(float(one.high.max()) for one in without.values()) < 200
    static = Treatment(scheme=Scheme(8, 8), ranges=ranges)
    treatments = {
        "clean": None,
        "static": static,
        "by token": dataclasses.replace(static, per_token=True),
        "prefix": dataclasses.replace(static, positions=(0,), ranges=without),
    }
    loss = {name: float(twin.losses(measured, treatment).nanmean()) for name, treatment in treatments.items()}
    assert 0.3 < loss["static"] - loss["clean"] < 1.0
    assert abs(loss["by token"] - loss["clean"]) < 0.1
    assert loss["prefix"] - loss["clean"] < 0.4 * (loss["static"] - loss["clean"])
    middle = {
        key: dataclasses.replace(static, sites=frozenset({f"model.layers.{layer}.mlp.down_proj"}))
        for key, layer in (("born there", 11), ("an ordinary block", 20))
    }
    alone = dict(zip(middle, twin.losses_of(measured, list(middle.values())).nanmean(dim=(1, 2)).tolist(), strict=True))
    assert alone["born there"] - loss["clean"] > 0.03 > abs(alone["an ordinary block"] - loss["clean"])
