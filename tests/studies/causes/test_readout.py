"""Samples and readouts: what is scored, and losses and divergences worked out by hand, the same with and without logits."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import transformers

from sinklab.errors import ConfigurationError, MeasurementError, UnsupportedModelError
from sinklab.models.losses import LogitMap
from sinklab.studies.causes.readout import ClassLogits, MaskedToken, NextToken, readout_for
from sinklab.studies.causes.samples import Samples, masked_samples, token_samples
from sinklab.testing import tiny_models


def test_means_by_domain_by_hand():
    samples = Samples({"x": torch.zeros(2, 3)}, torch.tensor([[0, 1, 0], [-1, 1, 1]]), domain_names=("trigger", "other"))
    values = torch.tensor([[1.0, 2.0, 4.0], [math.nan, 3.0, 5.0]])  # what is not scored may be anything
    found = samples.by_domain(values, "the loss")
    assert found.dtype == torch.float64
    assert found[0].tolist() == [2.5, 2.0]
    assert math.isnan(found[1, 0])
    assert found[1, 1] == 4.0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_numbers_of_scored_positions_that_are_not_finite_are_refused(broken):
    samples = Samples({"x": torch.zeros(2, 3)}, torch.tensor([[0, 1, 0], [-1, 1, 1]]), domain_names=("trigger", "other"))
    values = torch.zeros(2, 3)
    values[0, 1] = values[1, 2] = broken
    message = r"domain 'other': the loss is not finite at 2 of 5 scored positions; run the model in float32"
    with pytest.raises(MeasurementError, match=message):
        samples.by_domain(values, "the loss")
    values = torch.zeros(2, 3)
    values[1, 0] = broken  # not scored
    assert samples.by_domain(values, "the loss").nan_to_num(nan=-1.0).tolist() == [[0.0, 0.0], [-1.0, 0.0]]


def test_next_tokens_are_scored_everywhere_but_at_the_end():
    samples = token_samples([("code", torch.arange(6).view(2, 3)), ("prose", torch.arange(3)[None])])
    assert samples.domains.tolist() == [[0, 0, -1], [0, 0, -1], [1, 1, -1]]
    assert samples.domain_names == ("code", "prose")
    assert torch.equal(samples.targets, samples.inputs["input_ids"])
    with pytest.raises(ConfigurationError, match=r"one length of 2 tokens or more, got \[1\]"):
        token_samples([("code", torch.zeros(2, 1, dtype=torch.int64))])


def test_masked_tokens_are_scored_and_no_others():
    tokens = torch.arange(10, 32).view(2, 11)
    samples = masked_samples([("one", tokens[:1]), ("two", tokens[1:])], mask_token=3, share=1 / 3, seed=5)
    masked = samples.inputs["input_ids"] == 3
    assert masked.sum(1).tolist() == [3, 3]  # a third of the nine between the first and the last
    assert not masked[:, [0, -1]].any()
    assert torch.equal(samples.inputs["input_ids"][~masked], tokens[~masked])
    assert torch.equal(samples.targets, tokens)
    assert torch.equal(samples.domains, torch.where(masked, torch.tensor([[0], [1]]), -1))
    again = masked_samples([("one", tokens[:1]), ("two", tokens[1:])], mask_token=3, share=1 / 3, seed=5)
    assert torch.equal(again.inputs["input_ids"], samples.inputs["input_ids"])
    assert masked_samples([("one", tokens)], mask_token=3, share=0.01).domains.ge(0).sum(1).tolist() == [1, 1]
    with pytest.raises(ConfigurationError, match="above 0 and at most 1, got 0"):
        masked_samples([("one", tokens)], mask_token=3, share=0)
    with pytest.raises(ConfigurationError, match="3 tokens or more"):
        masked_samples([("one", tokens[:, :2])], mask_token=3)


def test_padding_is_neither_masked_nor_scored():
    tokens = torch.arange(10, 32).view(2, 11)
    tokens[0, 8:] = 0
    samples = masked_samples([("one", tokens)], mask_token=3, padding=0, share=1.0)
    assert samples.inputs["attention_mask"].sum(1).tolist() == [8, 11]
    assert samples.domains.ge(0).nonzero().tolist() == [[0, k] for k in range(1, 7)] + [[1, k] for k in range(1, 10)]
    # Of six and of nine tokens a third.
    assert masked_samples([("one", tokens)], mask_token=3, padding=0, share=1 / 3).domains.ge(0).sum(1).tolist() == [2, 3]
    for wrong in (torch.tensor([[5, 0, 6, 7]]), torch.tensor([[0, 5, 6, 7]]), torch.tensor([[5, 6, 0, 0]])):
        with pytest.raises(ConfigurationError, match="padding 0 must stand behind the end of a text"):
            masked_samples([("one", wrong)], mask_token=3, padding=0)


def test_next_tokens_of_texts_of_different_lengths_are_scored_up_to_the_end_of_each():
    tokens = torch.tensor([[5, 6, 7, 9], [5, 8, 9, 9]])
    samples = token_samples([("one", tokens)], padding=9)
    assert samples.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert samples.domains.tolist() == [[0, 0, -1, -1], [0, -1, -1, -1]]
    with pytest.raises(ConfigurationError, match=r"padding 9 .* a text must have 2 tokens or more before it"):
        token_samples([("one", torch.tensor([[5, 9]]))], padding=9)


def test_parts():
    samples = token_samples([("a", torch.arange(14).view(7, 2))])
    parts = list(samples.parts(3))
    assert [(start, len(part)) for start, part in parts] == [(0, 2), (2, 2), (4, 3)]
    assert torch.equal(torch.cat([part.targets for _, part in parts]), samples.targets)
    assert samples.bounds(2) == [(0, 2), (2, 4), (4, 7)]  # no sample is alone,
    assert samples.bounds(1) == [(number, number + 1) for number in range(7)]  # unless that is asked for
    assert samples.bounds(16) == [(0, 7)]


def test_parts_have_samples_of_one_kind():
    """What is taken from the next sample of a part comes from the same domain."""
    tokens = torch.zeros(5, 3, dtype=torch.int64)
    samples = token_samples([("a", tokens), ("b", tokens[:2])])
    assert samples.bounds(4) == [(0, 2), (2, 5), (5, 7)]
    mixed = Samples({"x": torch.zeros(4, 2)}, torch.tensor([[0, 0], [1, 1], [0, 0], [1, 1]]), None, ("a", "b"))
    assert mixed.bounds(4) == [(0, 4)]


LOGITS = torch.tensor([[[0.0, math.log(3.0)], [math.log(4.0), 0.0], [0.0, 0.0]]])
"""Probabilities (1/4, 3/4), (4/5, 1/5), (1/2, 1/2)."""


def one_text(*numbers: int, domains: tuple[int, ...] = (0, 0, 0)) -> Samples:
    one = torch.tensor([numbers])
    return Samples({"input_ids": one}, torch.tensor([domains]), one)


def test_next_token_by_hand():
    samples = one_text(0, 1, 0, domains=(0, 0, -1))
    loss = NextToken().loss(LOGITS, samples)
    assert loss[0, :2].tolist() == pytest.approx([math.log(4 / 3), math.log(5 / 4)])


def test_masked_token_by_hand():
    samples = one_text(1, 1, 0)
    assert MaskedToken().loss(LOGITS, samples)[0].tolist() == pytest.approx([math.log(4 / 3), math.log(5), math.log(2)])
    unscored = one_text(-100, 1, 0, domains=(-1, 0, 0))  # a target that is none is no index
    assert MaskedToken().loss(LOGITS, unscored)[0, 1:].tolist() == pytest.approx([math.log(5), math.log(2)])


def test_classes_by_hand():
    samples = Samples({"pixel_values": torch.zeros(3, 1)}, torch.zeros(3, 1, dtype=torch.int64), torch.tensor([1, 1, 0]))
    loss = ClassLogits().loss(LOGITS[0], samples)
    assert loss.shape == (3, 1)
    assert loss[:, 0].tolist() == pytest.approx([math.log(4 / 3), math.log(5), math.log(2)])


@pytest.mark.parametrize("offset", [0.0, 300.0, -1000.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("readout", [NextToken(), MaskedToken()])
def test_changes_from_hidden_states_are_those_from_logits(monkeypatch, readout, bias, offset):
    monkeypatch.setattr("sinklab.models.losses.COLUMNS", 16)  # several tiles in both directions
    monkeypatch.setattr("sinklab.models.losses.TILE", 64)
    generator = torch.Generator().manual_seed(0)
    vocabulary, width, samples = 50, 6, 3

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = normal(vocabulary, width)
    shift = normal(vocabulary) + offset if bias else None
    targets = torch.randint(0, vocabulary, (samples, 7), generator=generator)
    domains = torch.randint(-1, 1, (samples, 7), generator=generator)
    texts = Samples({"input_ids": targets}, domains, targets)
    clean, edited = normal(samples, 7, width), normal(2 * samples, 7, width)
    edited[0] *= 40.0  # far from the others
    edited[samples:] = clean  # the second edit changes nothing
    found = readout.compare_hidden(clean, LogitMap(weight, shift), texts)
    expected = readout.compare(torch.nn.functional.linear(clean, weight, shift), texts)
    scored = domains >= 0
    # Logits of size 1000 and float64: 1e-13 each.
    assert torch.allclose(found.clean_loss[scored], expected.clean_loss[scored], rtol=0, atol=1e-11)
    one, other = found.changes(edited), expected.changes(torch.nn.functional.linear(edited, weight, shift))
    assert one.shape == other.shape == (2, samples, 7)
    assert torch.allclose(one[:, scored], other[:, scored], rtol=0, atol=1e-11)
    assert (one[1] == 0).all()  # to the bit


def test_half_precision_is_read_in_single():
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(50, 16, generator=generator).bfloat16(), torch.randn(2, 5, 16, generator=generator).bfloat16()
    texts = token_samples([("all", torch.randint(0, 50, (2, 5), generator=generator))])
    found = NextToken().compare_hidden(hidden, LogitMap(weight), texts)
    exact = NextToken().compare(hidden.double() @ weight.double().T, texts)
    assert found.clean_loss.dtype == torch.float32
    assert (found.clean_loss - exact.clean_loss)[:, :-1].abs().max() < 1e-5  # losses of size 5 to 10 in float32


def test_the_readout_for_a_model():
    small = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert, vit = transformers.BertConfig(**small), transformers.ViTConfig(**{**small, "image_size": 4, "patch_size": 2})
    assert isinstance(readout_for(tiny_models()["gpt2"]), NextToken)
    assert isinstance(readout_for(transformers.BertForMaskedLM(bert)), MaskedToken)
    assert isinstance(readout_for(transformers.ViTForImageClassification(vit)), ClassLogits)
    with pytest.raises(UnsupportedModelError, match=r"no loss is known for a BertModel; .* give a readout of your own"):
        readout_for(transformers.BertModel(bert))
    t5 = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match=r"the loss of a T5\w+ is taken of a target token, .* MaskedToken"):
        readout_for(transformers.T5ForConditionalGeneration(t5))


def test_outputs_that_do_not_fit():
    texts = one_text(0, 1, 0)
    for readout in (NextToken(), MaskedToken()):
        with pytest.raises(UnsupportedModelError, match=r"needs logits \(samples, seq_len, vocab_size\), .* gives none"):
            readout.outputs(SimpleNamespace(), texts)
    with pytest.raises(UnsupportedModelError, match=r"a loss of tokens .* gives \(1, 4, 2\)"):
        NextToken().outputs(SimpleNamespace(logits=torch.zeros(1, 4, 2)), texts)
    with pytest.raises(UnsupportedModelError, match=r"one scored position a sample, .* with domains \(1, 3\)"):
        ClassLogits().outputs(SimpleNamespace(logits=torch.zeros(1, 4)), texts)
