"""Variants: their names, the mean of the sink, and what hiding it takes away."""

from __future__ import annotations

import pytest
import torch
from tests.studies.causes.planted import FAR, PlantedLM, Spy, fresh, induction, no_op, planted, sinks_of

from sinklab import attend
from sinklab.attention.editing import of_heads
from sinklab.attention.operation import repeat_groups
from sinklab.sinks import Head
from sinklab.studies.causes.effects import MeanSink, make_variants
from sinklab.studies.causes.engine import all_heads_edited
from sinklab.studies.causes.samples import token_samples
from sinklab.testing import tiny_models


@pytest.fixture(scope="module")
def known():
    found = planted("induction", 0)
    return found, sinks_of(found.model, found.samples)


def test_names(known):
    found, sink = known
    names = {variant.name for variant in make_variants(found.model, sink, found.samples)}
    assert names == {"redirect", "hide", "zero", "zero_value", "resample"}  # BOS is the same everywhere: it has no mean
    varying = planted("message", 0, texts=8)
    assert "mean_sink" in {
        one.name for one in make_variants(varying.model, sinks_of(varying.model, varying.samples), varying.samples)
    }


def test_the_mean_of_the_sink_is_over_other_texts_and_spares_its_own_query():
    """Against a dense softmax with key and value of position 0 replaced, on grouped queries."""
    model, spy = tiny_models()["llama"], Spy()
    tokens = torch.randint(1, 50, (4, 7), generator=torch.Generator().manual_seed(1))
    samples = token_samples([("words", tokens)])
    edit = MeanSink.over(model, samples, 0, batch_size=3)
    with torch.no_grad(), attend(model, [spy]):
        model(tokens)
    call = spy.calls[0]
    keys, values = (repeat_groups(tensor, call.groups).clone() for tensor in (call.keys, call.values))
    for tensor in (keys, values):
        tensor[:, :, 0] = (tensor[:, :, 0].sum(0) - tensor[:, :, 0]) / 3
    scores = (call.queries @ keys.mT * call.scaling).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    found = all_heads_edited(call, [edit])
    assert torch.allclose(found[:, 1:], expected[:, 1:], rtol=0, atol=1e-12)  # float64
    assert torch.equal(found[:, 0], call.head_outputs[:, 0])
    one = all_heads_edited(of_heads(call, [1]), [edit])[:, :, 0]
    assert torch.allclose(one, found[:, :, 1], rtol=0, atol=1e-12)
    part = edit.of_samples(1, 3)
    assert torch.equal(part.keys[call.site.module], edit.keys[call.site.module][1:3])


def test_hiding_and_zeroing_the_value_take_the_same_mass_away():
    """The control of the second axis. Both leave the content; hiding scales it up to mass 1, the other leaves it what it has.

    Values are one for a token and 0 for BOS, so that the sum of an output is its mass on content.
    """
    model, tokens = PlantedLM([induction(sink=2.0), no_op(sink=FAR / 2)]).eval(), fresh(3, 0)
    samples = token_samples([("fresh", tokens)])
    sink = sinks_of(model, samples, place=0)
    variants = {variant.name: variant for variant in make_variants(model, sink, samples)}
    outputs = {}
    attention = model.layers[0].self_attn
    for name in ("as it is", "hide", "zero_value"):
        edits = [edit for head in range(2) for edit in variants[name].on(Head(0, head), 0, 3)] if name in variants else []
        hook = attention.o_proj.register_forward_pre_hook(
            lambda _, args, name=name: outputs.update({name: args[0].unflatten(-1, (2, -1))[:, 1:].clone()})
        )
        with torch.no_grad(), attend(model, interventions=edits):
            model(input_ids=tokens)
        hook.remove()
    content = outputs["zero_value"].sum(-1, keepdim=True)
    assert ((content > 0.01) & (content < 0.99)).any()
    # float64, sums of 23 numbers of at most 1.
    torch.testing.assert_close(outputs["zero_value"], outputs["as it is"], atol=1e-14, rtol=0)  # BOS says 0 here
    torch.testing.assert_close(outputs["hide"], outputs["zero_value"] / content, atol=1e-13, rtol=0)
    weights = (1 - content).mean((0, 1))[:, 0].tolist()
    assert weights == pytest.approx(sink.weights.tolist(), abs=1e-12)  # what the sink is found by
