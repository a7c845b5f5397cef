"""Key bias: a key that carries nothing, one that carries what is needed, and scores against a dense computation."""

from __future__ import annotations

import json

import pytest
import torch
from tests.studies.causes.planted import PlantedLM, Spy, broadcast, by_name, drawn, no_op, repeated, sinks_of, zipf

from sinklab import attend
from sinklab.attention.operation import repeat_groups
from sinklab.errors import ConfigurationError
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.results.intervals import Interval
from sinklab.results.sections import to_json
from sinklab.results.table import make_table
from sinklab.studies.causes.key_bias import _Scores, key_bias, rows
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.samples import token_samples
from sinklab.studies.causes.show import _verdict
from sinklab.testing import tiny_models

NEGLIGIBLE = 1e-6
"""Weights beside a sink of score 20 are below 22 e^-10 in the planted heads, and what they carry is of size 4; float64."""


def found_in(model, samples, place=0, **settings):
    settings.setdefault("readout", NextToken())
    return key_bias(model, samples, sinks_of(model, samples, place=place), **settings)


def test_a_sink_that_carries_nothing_is_a_key_bias_with_a_constant_score():
    found = found_in(PlantedLM([no_op()]), token_samples([("words", repeated(6, seed=1))]))
    for name in ("zero_value", "zero_value of sink heads"):
        assert (found.losses[name].low, found.losses[name].high) == (0.0, 0.0), name
    # Its score is 20 for every query, so that the mean over queries is what it was.
    assert abs(found.losses["constant_score"].mean) < NEGLIGIBLE
    assert found.sink_heads == ["0.0"]


def test_a_sink_that_broadcasts_is_missed():
    found = found_in(PlantedLM([broadcast(zipf())]), token_samples([("words", drawn(zipf(), 8, seed=2))]))
    assert found.losses["zero_value"].low > 0.1
    assert found.losses["zero_value beyond control"].low > 0.1
    assert abs(found.losses["zero_value control"].mean) < NEGLIGIBLE


def test_a_sink_whose_value_does_harm_is_not_missed():
    """Its value brings the logarithms of the frequencies with the wrong sign."""
    harmful = broadcast(zipf())
    harmful.output.neg_()
    found = found_in(PlantedLM([harmful]), token_samples([("words", drawn(zipf(), 8, seed=2))]))
    assert found.losses["zero_value"].high < -0.1


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.005, 0.009, "nothing"), (0.01, 0.2, "missed"), (-0.2, -0.01, "harm")]
    + [(low, high, "open") for low, high in ((0.005, 0.2), (-0.2, -0.005), (-0.2, 0.2))],
)
def test_verdicts_go_by_the_side_of_the_change(low, high, verdict):
    assert _verdict(Interval((low + high) / 2, low, high), 0.01) == verdict


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mean_scores_are_those_of_a_dense_computation(name):
    model, spy, scores = tiny_models()[name], Spy(), _Scores(2)
    tokens = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), attend(model, [spy, scores]):
        model(tokens)
    for call in spy.calls:
        keys = repeat_groups(call.keys, call.groups)[:, :, 2, None]
        expected = (call.queries[:, :, 3:] * keys).sum(-1).mean((0, 2)) * call.scaling
        assert torch.allclose(scores.means()[call.site.module], expected, rtol=0, atol=1e-12)  # float64


def test_a_constant_score_is_put_where_the_definition_says():
    """On one head of a real model, by a dense softmax with the mean in the column of the sink."""
    model, spy = tiny_models()["gpt2"], Spy()
    tokens = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    samples = token_samples([("words", tokens)])
    with torch.no_grad(), attend(model, [spy]):
        clean = model(tokens).logits
    call = spy.calls[0]
    module = __import__("sinklab.studies.causes.key_bias", fromlist=["_ConstantScore"])
    constants = call.scores(0, 7)[:, :, 1:, 0].mean((0, 2))
    edit = module._ConstantScore(place=0, constants={call.site.module: constants}, heads={0: (1, 3)})
    seen = []
    handle = model.transformer.h[0].attn.c_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad(), attend(model, interventions=[edit]):
        edited = model(tokens).logits
    handle.remove()
    scores = call.scores(0, 7).clone()
    scores[:, [1, 3], 1:, 0] = constants[None, [1, 3], None]
    weights = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    assert torch.allclose(seen[0].unflatten(-1, (4, 8)).transpose(1, 2), weights @ call.values, rtol=0, atol=1e-12)
    assert not torch.allclose(edited, clean)
    assert len(samples) == 2


def test_the_null_score_is_a_place():
    model = PlantedLM([no_op()], SoftmaxPlusOne())
    samples = token_samples([("words", repeated(4, seed=1))])
    found = found_in(model, samples, place="null")
    # The null score of softmax plus one is 0 for every query and carries nothing: neither edit is one.
    assert found.losses["zero_value"].mean == 0
    assert found.losses["constant_score"].mean == 0
    record = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert record["place"] == "null"
    table = make_table(rows(found, by_name(sinks_of(model, samples, place="null"))))
    assert {"loss_change", "loss_change_low"} <= set(table["metric"])


def test_what_cannot_be_is_refused():
    model, samples = PlantedLM([no_op()]), token_samples([("words", repeated(4, seed=1))])
    with pytest.raises(ConfigurationError, match="needs a sink, and none was found"):
        found_in(model, samples, place=None)
    with pytest.raises(ConfigurationError, match="no query sees a key at the sink, position 22"):
        found_in(model, samples, place=22)
    with pytest.raises(ConfigurationError, match="needs two texts or more"):
        found_in(model, samples.part(0, 1))
