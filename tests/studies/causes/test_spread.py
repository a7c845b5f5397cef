"""Spread: equals a trace by hand, is exactly zero where nothing is passed on, and needs what it says."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from tests.studies.causes.planted import by_name, sinks_of, small_lm, words

from sinklab import attend
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.interventions.hide_key import HideKey
from sinklab.results.sections import to_json
from sinklab.results.table import make_table
from sinklab.sinks import Sinks
from sinklab.studies.causes.readout import MaskedToken
from sinklab.studies.causes.samples import Samples, token_samples
from sinklab.studies.causes.spread import rows, spread
from sinklab.testing import tiny_models

LENGTH = 16


def stacked(by_condition):
    """Curves or totals of all conditions, ``(conditions, layers, …)``."""
    return np.array(list(by_condition.values()), dtype=float)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embeddings_pass_nothing_on_and_layers_do(name):
    model, samples = tiny_models()[name], words(length=LENGTH)
    found = spread(model, samples, sinks_of(model, samples, place=0), replaced=1, batch_size=3)
    assert found.layers == [-1, 0, 1]
    assert found.distances[:4] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    curves = stacked(found.curves)
    assert (curves[:, 0] == 0).all()
    assert (stacked(found.totals)[:, 0] == 0).all()
    assert (curves[:, 1:, 0] > 0).all()
    whole = spread(model, samples, sinks_of(model, samples, place=0), replaced=1)
    assert np.allclose(curves, stacked(whole.curves), rtol=0, atol=1e-9)  # float64, batches of another size


def test_one_replaced_token_traced_by_hand(monkeypatch):
    model, samples = tiny_models()["llama"], words(2, LENGTH)
    where, new = torch.tensor([[5], [6]]), torch.tensor([[7], [9]])
    module = __import__("sinklab.studies.causes.spread", fromlist=["spread"])
    monkeypatch.setattr(module, "_replaced_positions", lambda *args: where)
    monkeypatch.setattr(module, "_other_tokens", lambda *args: new)
    found = spread(model, samples, sinks_of(model, samples, place=0), replaced=1)
    tokens = samples.inputs["input_ids"]
    changed = tokens.clone()
    changed[0, 5], changed[1, 6] = 7, 9
    ratios, last = [], []
    model.model.layers[-1].register_forward_hook(
        lambda _, args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    for name, edits in (("sink", []), ("no sink", [HideKey(place=0, spare=4)])):  # a quarter of so short a text
        states = []
        for ids in (tokens, changed):
            with torch.no_grad(), attend(model, interventions=edits):
                states.append(model.model(ids, output_hidden_states=True).hidden_states)
        # The last of transformers' hidden states is behind the final norm; the one before it is the output of layer 0.
        before, after = (one[1] for one in states)
        change, behind = ((new - old).norm(dim=-1) / old.norm(dim=-1) for old, new in ((before, after), last[-2:]))
        totals, at_end = ([float(one[0, 6:].mean()), float(one[1, 7:].mean())] for one in (change, behind))
        assert found.totals[name][1] == pytest.approx(np.mean(totals), abs=1e-12)
        assert found.curves[name][1][0] == pytest.approx(float((change[0, 6] + change[1, 7]) / 2), abs=1e-12)
        ratios.append(at_end)
    ratio = np.exp(np.log(np.array(ratios[1]) / np.array(ratios[0])).mean())
    assert found.ratios["no sink"].mean == pytest.approx(float(ratio), rel=1e-12)


def test_nothing_spreads_where_every_token_sees_itself_alone():
    model, samples = small_lm(window=1), words(length=LENGTH)
    with pytest.raises(ConfigurationError):  # no key is seen by another query, so there is no sink to find
        sinks_of(model, samples).require()
    sink = dataclasses.replace(Sinks.at(0), length=LENGTH)
    found = spread(model, samples, sink)
    assert (stacked(found.totals) == 0).all()
    assert (stacked(found.curves) == 0).all()
    assert found.ratios == {"no sink": None, "control": None}
    json.dumps(to_json(found), allow_nan=False)


def test_a_window_bounds_the_distance_exactly():
    # Three layers that each see the token itself and two before it pass a change on by at most 6 tokens.
    model, samples = small_lm(window=3), words(length=32)
    found = spread(model, samples, sinks_of(model, samples, place=0), replaced=3)
    reached = [distance for distance, value in zip(found.distances, found.curves["sink"][-1], strict=True) if value > 0]
    assert reached == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert [one for one, value in zip(found.distances, found.curves["sink"][1], strict=True) if value > 0] == [(1, 1), (2, 2)]


def test_what_a_sink_holds_back_is_seen():
    """Position 0 takes almost all of the weight in every head; hidden, the heads mix everything else."""
    model, samples = tiny_models()["gpt2"], words(length=32)
    with torch.no_grad():
        for block in model.transformer.h:
            # Queries of all heads agree with one direction, which the key of position 0 alone has.
            block.attn.c_attn.weight[:, :64] *= 0.05
            block.attn.c_attn.bias[:32] = 3.0
        model.transformer.wpe.weight[0] *= 0.0
        model.transformer.wpe.weight[0, 0] = 60.0
        for block in model.transformer.h:
            block.attn.c_attn.weight[0, 32:64] = 1.0
    sink = sinks_of(model, samples)
    assert sink.main.place == 0
    assert sink.weights.min() > 0.9
    found = spread(model, samples, sink)
    assert found.ratios["no sink"].low > 2 > found.ratios["control"].high
    table = make_table(rows(found, by_name(sink)))
    assert {"spread_total", "spread_at_distance", "spread_ratio", "spread_ratio_low", "loss_change"} <= set(table["metric"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"place": None}, "needs a sink, and none was found"),
        ({"length": 6}, "8 tokens or more, without padding; got \\(4, 6\\)"),
        ({"same": True}, "made of one token"),
        ({"count": 1}, "needs two texts or more"),
    ],
)
def test_what_cannot_be_is_refused(change, said):
    model = tiny_models()["llama"]
    samples = words(change.get("count", 4), change.get("length", LENGTH))
    if "same" in change:
        samples = token_samples([("words", torch.ones(4, LENGTH, dtype=torch.int64))])
    sink = sinks_of(model, samples, place=change.get("place", 0))
    with pytest.raises(ConfigurationError, match=said):
        spread(model, samples, sink, replaced=change.get("replaced", 2))
    pixels = Samples({"pixel_values": torch.zeros(2, 3, 8, 8)}, torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match="these samples have no input_ids"):
        spread(model, pixels, sinks_of(model, words(), place=0))


def test_sequences_of_several_lengths_have_no_distance():
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    tokens = torch.randint(4, 50, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    samples = Samples({"input_ids": tokens, "decoder_input_ids": tokens[:, :9]}, torch.zeros_like(tokens), tokens)
    sink = dataclasses.replace(Sinks.at(0), length=LENGTH)
    with pytest.raises(UnsupportedModelError, match="sequences of several lengths"):
        spread(model, samples, sink, readout=MaskedToken())
