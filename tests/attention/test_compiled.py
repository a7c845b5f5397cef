"""Sessions on compiled models, and beside them: what is looked at is not compiled, and nothing else is slower or refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab import SinkCache, attend
from sinklab.interventions.zero_head import ZeroHead
from sinklab.probes.sink_rate import SinkRate
from sinklab.streaming.host import compile_steps

TOKENS = torch.arange(24)[None]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def seen(model, run, **options):
    with torch.no_grad(), attend(model, probes=[SinkRate(threshold=0.3)], **options) as session:
        logits = run(TOKENS).logits
    return session.table(), logits


def compiled_in_place(model, backend, **options):
    model = copy.deepcopy(model)
    model.compile(backend=backend, **options)
    return model, model


def wrapped(model, backend, **options):
    model = copy.deepcopy(model)
    return model, torch.compile(model, backend=backend, **options)


def compiled_by_layers(model, backend, **options):
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.compile(backend=backend, **options)
    return model, model


@pytest.mark.parametrize("way", [compiled_in_place, wrapped, compiled_by_layers])
def test_a_session_has_the_numbers_of_the_model_and_its_graphs_hold_nothing_of_ours(way):
    model, graphs = make_sinklm().eval(), Graphs()
    edits = [ZeroHead(heads={1: (0,)})]
    (plain, logits), (edited, other) = seen(model, model), seen(model, model, interventions=edits)
    assert not torch.equal(logits, other)
    own, run = way(model, graphs)
    with torch.no_grad():
        assert torch.equal(run(TOKENS).logits, logits)
    before = graphs.count
    torch._dynamo.utils.counters.clear()
    for options, table, expected in (({}, plain, logits), ({"interventions": edits}, edited, other)):
        found = seen(own, run, **options)
        assert found[0].equals(table)
        assert torch.equal(found[1], expected)
    assert graphs.count > before
    # Each break is one that was asked for: nothing of a session is traced until something in it cannot be.
    assert all("sinklab looks at this model" in reason for reason in torch._dynamo.utils.counters["graph_break"])
    with torch.no_grad():
        assert torch.equal(run(TOKENS).logits, logits)


def test_one_graph_is_refused_with_what_to_do():
    model, run = wrapped(make_sinklm().eval(), "eager", fullgraph=True)
    with pytest.raises(Exception, match=re.escape("sinklab looks at this model, and looking is not compiled: leave fullgraph")):
        seen(model, run)
    with torch.no_grad():
        assert torch.equal(run(TOKENS).logits, model(TOKENS).logits)


def test_another_model_is_compiled_in_one_graph_while_a_session_is_open():
    model = make_sinklm().eval()
    other, run = wrapped(make_sinklm().eval(), "eager", fullgraph=True)
    with torch.no_grad(), attend(model, probes=[SinkRate(threshold=0.3)]):
        expected = model(TOKENS).logits
        assert torch.equal(run(TOKENS).logits, expected)
        assert torch.equal(other(TOKENS).logits, expected)


def test_compiled_steps_run_uncompiled_in_a_session():
    model, graphs = make_sinklm().eval(), Graphs()

    def read(model):
        cache = SinkCache(model, num_sinks=2, window=20)
        with torch.no_grad():
            model(TOKENS[:, :12], past_key_values=cache)
            return torch.cat([model(TOKENS[:, at : at + 1], past_key_values=cache).logits for at in range(12, 24)], dim=1)

    expected = read(model)
    compile_steps(model, backend=graphs)
    with attend(model) as session:
        torch.testing.assert_close(read(model), expected)
    assert session.calls.total() == 13 * len(model.layers)
    assert not graphs.count
    torch.testing.assert_close(read(model), expected)
    assert graphs.count
