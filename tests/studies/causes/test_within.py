"""Where heads rest, in models whose queries are not the positions that are scored, or not these alone."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.conftest import make_sinklm

from sinklab import attend
from sinklab.attention.probe import Watcher
from sinklab.sinks import find_sinks
from sinklab.studies.causes.effects import make_variants
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.labels import _where_it_rests, label_heads, split, switches_within
from sinklab.studies.causes.readout import ClassLogits, MaskedToken, NextToken
from sinklab.studies.causes.samples import Samples, token_samples, whole_samples

TEXTS = 12


def rests_of(model, samples):
    """Every head of self-attention, and where it rests."""
    sinks = find_sinks(model, samples.inputs, place=0)
    return dict(zip(sinks.heads, _where_it_rests(model, samples, sinks, sinks.heads, batch_size=5), strict=True))


def labels_with_halves(model, samples, readout):
    """The labels of all heads before and after each is looked at in halves."""
    sinks = find_sinks(model, samples.inputs, place=0)
    variants = make_variants(sinks, samples)
    labels = label_heads(measure_effects(model, samples, readout, variants, sinks.heads), sinks, minimal_effect=1e-9)
    asked = {"level": 0.05, "minimal_effect": 1e-9}

    def measure(halves):
        return {head: measure_effects(model, parted, readout, variants, [head]) for head, parted in halves.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinklab.studies.causes.labels._candidates", lambda *given: list(sinks.heads))
        return labels, switches_within(model, samples, sinks, labels, measure, **asked)


def classifier():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=2,
        num_labels=3,
    )
    pixels = torch.randn(TEXTS, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    samples = whole_samples({"pixel_values": pixels}, torch.arange(TEXTS) % 3)
    return transformers.ViTForImageClassification(config).eval(), samples


def translator(target):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0
    )
    source, out = torch.randint(3, 60, (TEXTS, 10)), torch.randint(3, 60, (TEXTS, target))
    inputs = {"input_ids": source, "decoder_input_ids": out}
    samples = Samples(inputs, torch.zeros_like(out), out.roll(-1, dims=1), ("translated",))
    return transformers.T5ForConditionalGeneration(config).eval(), samples


def test_a_classifier_has_no_halves():
    """Its 17 queries have one loss together."""
    model, samples = classifier()
    assert set(rests_of(model, samples).values()) == {None}
    labels, found = labels_with_halves(model, samples, ClassLogits())
    assert found == labels


@pytest.mark.parametrize("target", [7, 10])
def test_heads_of_an_encoder_have_no_halves_whatever_the_lengths(target):
    """Losses are of the target, and the positions at which these heads rest are of the source."""
    model, samples = translator(target)
    rests = rests_of(model, samples)
    encoder = [own for head, own in rests.items() if head.module.startswith("encoder")]
    decoder = [own for head, own in rests.items() if head.module.startswith("decoder")]
    assert encoder == [None, None]
    assert [own.shape for own in decoder] == [(TEXTS, target)] * 2
    labels, found = labels_with_halves(model, samples, MaskedToken())
    assert [label.domains for label in found if label.head.module.startswith("encoder")] == [
        label.domains for label in labels if label.head.module.startswith("encoder")
    ]


class Shares(Watcher):
    """The share of every row on the first key."""

    name, needs = "shares", frozenset()

    def __init__(self):
        self.of = {}

    def update(self, call, statistics):
        self.of[call.site.module] = call.weights(0, call.q_len)[..., 0]


def test_learned_tokens_in_front_are_not_of_the_text():
    model = make_sinklm({"name": "sink_token", "count": 2})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(30)  # rows with most of their weight on one key
    samples = token_samples([("words", torch.randint(2, 300, (TEXTS, 9), generator=torch.Generator().manual_seed(1)))])
    shares = Shares()
    with torch.no_grad(), attend(model, [shares]):
        model(**samples.inputs)
    for head, rests in rests_of(model, samples).items():
        expected = shares.of[head.module][:, head.head] > 0.5
        assert expected.shape == (TEXTS, 11)
        assert torch.equal(rests, expected[:, 2:])
        assert split(samples, rests).domains.shape == (TEXTS, 9)
    labels, found = labels_with_halves(model, samples, NextToken())
    assert [label.head for label in found] == [label.head for label in labels]
