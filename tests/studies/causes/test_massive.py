"""Massive activations: planted ones are found where they are put, and the edits do what their definitions say."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.studies.causes.planted import by_name, sinks_of, small_lm

from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.results.sections import to_json
from sinklab.results.table import make_table
from sinklab.studies.causes.massive import _points, massive_activations, rows
from sinklab.studies.causes.samples import Samples, token_samples
from sinklab.testing import tiny_models

CHANNEL, SIZE = 7, 400.0


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


def test_a_planted_channel_is_found_with_its_birth_and_death(model, samples):
    found = massive_activations(model, samples, least=100.0, times_median=50.0)
    (one,) = found.found
    assert (one.position, one.channel, one.birth, one.death, one.texts) == (0, CHANNEL, 1, 3, 4)
    # Four numbers 400, 440, 480, 520 and what the layers add, which is of the size of other channels.
    assert abs(one.value - 460.0) < 20
    assert abs(one.deviation - 44.7) < 10
    assert one.token in samples.inputs["input_ids"][:, 0]
    peaks = {peak["layer"]: peak for peak in found.peaks}
    assert set(peaks) == {-1, 0, 1, 2, 3}
    assert (peaks[1]["position"], peaks[1]["channel"]) == (0, CHANNEL)
    assert peaks[0]["value"] < 100 < peaks[1]["value"]


def test_edits_are_what_a_hook_that_sets_the_numbers_gives(model, samples):
    found = massive_activations(model, samples, least=100.0, times_median=50.0, batch_size=3)
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
        interval = found.edits[edit].loss
        # The readout is float64 here; sums of 11 losses of size 1 to 10.
        assert abs(interval.mean - float(expected.mean())) < 1e-9, edit
        assert interval.low < interval.mean < interval.high


def test_what_is_the_same_in_all_texts_is_its_own_mean(model, samples):
    tokens = samples.inputs["input_ids"].clone()
    tokens[:, 0] = 3
    found = massive_activations(model, token_samples([("words", tokens)]), least=100.0, times_median=50.0)
    zero, mean, control = found.edits.values()
    # Token 0 sees only itself, so its states are the same in every text; a mean of four equal numbers rounds once.
    assert abs(mean.loss.mean) < 1e-9
    assert abs(zero.loss.mean) > 5 * abs(control.loss.mean) > 0
    assert found.found[0].deviation < 1e-9


def test_means_of_what_stands_elsewhere_in_every_text_are_over_all_of_it():
    seen = {(0, 0, 7): {1: (400.0, 90.0)}, (1, 0, 7): {1: (500.0, 90.0)}, (0, 5, 7): {1: (10.0, 60.0), 2: (99.0, 60.0)}}
    seen |= {(1, 6, 7): {1: (30.0, 60.0)}, (2, 8, 7): {2: (70.0, 60.0)}, (2, 8, 3): {1: (-5.0, 60.0)}}
    points = _points(seen, "mean", 4, 32, torch.Generator())
    # Position 0: two of four texts, hence its own mean 450; positions 5 and 6 once each, hence 20; layer 2 and channel 3 apart.
    assert points[1].tolist() == [[0, 0, 7, 450], [1, 0, 7, 450], [0, 5, 7, 20], [1, 6, 7, 20], [2, 8, 3, -5]]
    assert points[2].tolist() == [[2, 8, 7, 70]]
    control = _points(seen, "control", 4, 32, torch.Generator().manual_seed(0))
    assert control[1][:, 3].tolist() == [0.0] * 5
    assert not {7.0} & set(control[1][:4, 2].tolist())


def test_the_sink_is_watched_while_editing(model, samples):
    sink = sinks_of(model, samples, place=0)
    found = massive_activations(model, samples, sink, least=100.0, times_median=50.0)
    assert found.heads == [str(head) for head in sink.heads]
    assert np.allclose(found.sink_weights, sink.weights, rtol=0, atol=1e-9)
    assert not np.allclose(found.edits["zero"].sink_weights, sink.weights, rtol=0, atol=1e-3)
    table = make_table(rows(found, by_name(sink)), model="planted")
    assert {"massive_born_value", "loss_change", "sink_share", "largest_times_median"} <= set(table["metric"])
    assert table["value"].notna().all()
    record = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert record["found"][0]["channel"] == CHANNEL
    assert set(record["edits"]) == {"zero", "mean", "control"}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_random_models_have_none_by_the_published_thresholds_nor_by_the_ratio_of_small_models(name, samples):
    found = massive_activations(tiny_models()[name], samples)
    assert not found.found
    assert not found.edits
    assert found.times_median == 50.0
    assert found.sink_weights is None


def test_padding_is_no_token(model, samples):
    tokens = samples.inputs["input_ids"]
    padded = torch.cat((tokens, torch.full((4, 3), 1)), 1)
    mask = torch.ones_like(padded)
    mask[:, -3:] = 0
    domains = torch.full(padded.shape, -1)
    domains[:, :11] = 0
    with_padding = Samples({"input_ids": padded, "attention_mask": mask}, domains, padded)
    plain = massive_activations(model, samples, least=100.0, times_median=50.0)
    found = massive_activations(model, with_padding, least=100.0, times_median=50.0)
    assert len(found.found) == 1
    assert found.found[0].times_median == pytest.approx(plain.found[0].times_median, rel=1e-9)
    assert found.edits["zero"].loss.mean == pytest.approx(plain.edits["zero"].loss.mean, abs=1e-9)


def test_thresholds_that_all_meet_are_refused():
    tokens = torch.randint(1, 50, (2, 400), generator=torch.Generator().manual_seed(1))
    model = SinkLM(SinkLMConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1)).eval()
    with pytest.raises(ConfigurationError, match="raise the thresholds"):
        massive_activations(model, token_samples([("words", tokens)]), least=0.0, times_median=1e-9)


@pytest.mark.parametrize(
    ("operation", "place"),
    [
        ("softmax", 2),
        ("sigmoid", 0),
        ("sink_token", 0),
        *((name, "null") for name in ("softmax_plus_one", "sink_logit", "key_bias")),
    ],
)
def test_the_weight_on_a_place_is_that_of_the_search(operation, place, samples):
    model = small_lm(num_hidden_layers=2, operation={"name": operation})
    sink = sinks_of(model, samples, place=place)
    found = massive_activations(model, samples, sink, batch_size=3)
    assert np.allclose(found.sink_weights, sink.weights, rtol=0, atol=1e-12)  # float64
