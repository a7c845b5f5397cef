"""Massive activations: planted ones are found where they are put, and the edits do what their definitions say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.studies.causes.planted import small_lm
from transformers import AlbertConfig, AlbertForMaskedLM

from sinklab.errors import DoesNotApply
from sinklab.studies.causes.samples import Samples, masked_samples, token_samples
from sinklab.testing import tiny_models
from sinklab_claims import sun2024
from sinklab_claims.sun2024 import _points, massive_activations

CHANNEL, SIZE = 7, 400.0


@pytest.fixture(autouse=True)
def _one_criterion(monkeypatch):
    """Between those of large models and of small ones: what is planted meets it, and nothing else."""
    monkeypatch.setattr(sun2024, "CRITERIA", ((100.0, 50.0),))


@pytest.fixture
def model():
    """Four layers in float64; the second one writes a number into one channel of position 0, the fourth takes it away.

    It differs with the token there: 400, 440, 480 or 520.
    """
    model, seen = small_lm(num_hidden_layers=4), {}
    model.embed_tokens.register_forward_hook(lambda module, args, output: seen.update(ids=args[0]))

    def planted(layer, size):
        def forward(*args, **kwargs):
            hidden, *rest = type(layer).forward(layer, *args, **kwargs)
            hidden = hidden.clone()
            hidden[:, 0, CHANNEL] += size * (1 + 0.1 * (seen["ids"][:, 0] % 4))
            return (hidden, *rest)

        return forward

    for layer, size in ((model.layers[1], SIZE), (model.layers[3], -SIZE)):
        layer.forward = planted(layer, size)
    return model


@pytest.fixture
def samples():
    tokens = torch.randint(1, 50, (4, 12), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = torch.tensor([4, 5, 6, 7])
    return token_samples([("words", tokens)])


def losses(model, samples):
    with torch.no_grad():
        logits = model(**samples.inputs).logits[:, :-1].log_softmax(-1)
    return -logits.gather(-1, samples.targets[:, 1:, None])[..., 0].mean(1)


def test_a_planted_channel_is_found(model, samples):
    found = massive_activations(model, samples)
    assert list(found.found) == [(0, CHANNEL)]
    values = np.array(found.found[0, CHANNEL])
    # Four numbers 400, 440, 480, 520 and what the layers add, which is of the size of other channels.
    assert abs(values.mean() - 460.0) < 20
    assert abs(values.std() - 44.7) < 10
    assert found.largest == pytest.approx(values.mean(), abs=20)
    assert found.times_median > 50


def test_edits_are_what_a_hook_that_sets_the_numbers_gives(model, samples):
    found = massive_activations(model, samples, batch_size=3)
    clean, seen = losses(model, samples), []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output[0][:, 0, CHANNEL]))
    losses(model, samples)
    for edit, number in (("zero", 0.0), ("mean", float(seen[0].mean()))):

        def set_it(module, args, output, number=number):
            hidden = output[0].clone()
            hidden[:, 0, CHANNEL] = number
            return (hidden, *output[1:])

        handle = model.layers[1].register_forward_hook(set_it)
        expected = losses(model, samples) - clean
        handle.remove()
        interval = found.losses[edit]
        # The readout is float64 here; sums of 11 losses of size 1 to 10.
        assert abs(interval.mean - float(expected.mean())) < 1e-9, edit
        assert interval.low < interval.mean < interval.high


def test_what_is_the_same_in_all_texts_is_its_own_mean(model, samples):
    tokens = samples.inputs["input_ids"].clone()
    tokens[:, 0] = 3
    found = massive_activations(model, token_samples([("words", tokens)]))
    zero, mean, control = found.losses.values()
    # Token 0 sees only itself, so its states are the same in every text; a mean of four equal numbers rounds once.
    assert abs(mean.mean) < 1e-9
    assert abs(zero.mean) > 5 * abs(control.mean) > 0
    assert np.std(found.found[0, CHANNEL]) < 1e-9


def test_means_of_what_stands_elsewhere_in_every_text_are_over_all_of_it():
    seen = {(0, 0, 7): {1: 400.0}, (1, 0, 7): {1: 500.0}, (0, 5, 7): {1: 10.0, 2: 99.0}}
    seen |= {(1, 6, 7): {1: 30.0}, (2, 8, 7): {2: 70.0}, (2, 8, 3): {1: -5.0}}
    points = _points(seen, "mean", 4, 32, torch.Generator())
    # Position 0: two of four texts, hence its own mean 450; positions 5 and 6 once each, hence 20; layer 2 and channel 3 apart.
    assert points[1].tolist() == [[0, 0, 7, 450], [1, 0, 7, 450], [0, 5, 7, 20], [1, 6, 7, 20], [2, 8, 3, -5]]
    assert points[2].tolist() == [[2, 8, 7, 70]]
    control = _points(seen, "control", 4, 32, torch.Generator().manual_seed(0))
    assert control[1][:, 3].tolist() == [0.0] * 5
    assert not {7.0} & set(control[1][:4, 2].tolist())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_random_models_have_none_by_the_published_thresholds_nor_by_the_ratio_of_small_models(name, samples, monkeypatch):
    monkeypatch.undo()
    found = massive_activations(tiny_models()[name], samples)
    assert (found.found, found.losses) == ({}, {})
    assert found.criterion == (0.0, 50.0)
    assert 0 < found.times_median < 50


def test_padding_is_no_token(model, samples):
    tokens = samples.inputs["input_ids"]
    padded = torch.cat((tokens, torch.full((4, 3), 1)), 1)
    mask = torch.ones_like(padded)
    mask[:, -3:] = 0
    domains = torch.full(padded.shape, -1)
    domains[:, :11] = 0
    plain = massive_activations(model, samples)
    found = massive_activations(model, Samples({"input_ids": padded, "attention_mask": mask}, domains, padded))
    assert list(found.found) == [(0, CHANNEL)]
    assert found.times_median == pytest.approx(plain.times_median, rel=1e-9)
    assert found.losses["zero"].mean == pytest.approx(plain.losses["zero"].mean, abs=1e-9)


def test_a_criterion_that_all_meet_is_refused(monkeypatch):
    monkeypatch.setattr(sun2024, "CRITERIA", ((0.0, 1e-9),))
    tokens = torch.randint(1, 50, (2, 400), generator=torch.Generator().manual_seed(1))
    with pytest.raises(DoesNotApply, match="values of one text are massive, which are to be few"):
        massive_activations(small_lm(num_hidden_layers=1), token_samples([("words", tokens)]))


def test_of_a_layer_that_runs_several_times_one_run_is_edited(samples):
    """The second run writes a number into one channel of position 0, and norms of the third take it away."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "embedding_size": 16, "num_hidden_layers": 3}
    model = AlbertForMaskedLM(AlbertConfig(vocab_size=50, max_position_embeddings=64, initializer_range=0.3, **shape)).eval()
    layer, runs = model.get_submodule("albert.encoder.albert_layer_groups.0.albert_layers.0"), []
    model.register_forward_pre_hook(lambda module, args, kwargs: runs.clear(), with_kwargs=True)

    def forward(*args, **kwargs):
        hidden = type(layer).forward(layer, *args, **kwargs).clone()
        runs.append(float(hidden[0, 0, CHANNEL]))
        if len(runs) == 2:
            hidden[:, 0, CHANNEL] += 400.0
        return hidden

    layer.forward = forward
    found = massive_activations(model, masked_samples([("all", samples.targets)], mask_token=2, share=0.4))
    assert list(found.found) == [(0, CHANNEL)]
    assert np.allclose(found.found[0, CHANNEL], 400, atol=10)
    assert found.losses["zero"].mean != 0
