"""What probes are shown when heads of one module are edited differently: one call that accounts for every head's output."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from edited_runs import Added, Scaled

from sinklab import attend
from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.editing import Editing, edited_outputs, of_heads
from sinklab.attention.intervention import HeadIntervention
from sinklab.attention.probe import Watcher
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.visibility import Causal
from sinklab.errors import ContractError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.redirect import Redirect
from sinklab.interventions.zero_value import ZeroValue
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax
from sinklab.testing import tiny_models

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8
ROUNDING = 1e-12
"""Float64; outputs of size 1 to 10, sums of six products."""


def make_call(**changes) -> AttentionCall:
    """A causal call of four heads on two keys and values, with outputs; ``changes`` are fields."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    call = AttentionCall(
        site=Site("attention", 0),
        queries=normal(BATCH, HEADS, LENGTH, WIDTH),
        keys=normal(BATCH, 2, LENGTH, WIDTH),
        values=normal(BATCH, 2, LENGTH, WIDTH),
        scaling=0.5,
        visible=Causal(),
        operation=Softmax(),
        query_positions=positions,
        key_positions=positions,
        query_documents=torch.zeros_like(positions),
        key_documents=torch.zeros_like(positions),
        **changes,
    )
    return dataclasses.replace(call, head_outputs=call.outputs(0, LENGTH).transpose(1, 2))


CALLS = {
    "plain": {},
    "bias": {"bias": torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)},
    "one bias": {"bias": torch.linspace(-1, 1, LENGTH, dtype=torch.float64).expand(1, 1, LENGTH, LENGTH)},
    "soft cap": {"softcap": 2.0},
    "null": {"sink_scores": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)[None, :, None]},
    "null value": {
        "sink_scores": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)[None, :, None],
        "null_value": torch.linspace(-1, 1, HEADS * WIDTH, dtype=torch.float64).view(HEADS, WIDTH),
    },
    "output bias and gate": {
        "output_bias": torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None],
        "gain": torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)[None, :, None, None],
    },
}


class _Anatomy:
    attention = {"attention": torch.nn.Identity()}
    layers: dict = {}
    shares_layers, depth = False, 1
    models = (torch.nn.Identity(),)


def edit(call, *interventions):
    edited, weights = Editing(interventions, _Anatomy()).edit(call, torch.nn.Identity().eval(), 0.0, want_weights=True)
    return types.SimpleNamespace(call=edited, outputs=edited.head_outputs, weights=weights)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OtherValue(HeadIntervention):
    """Give a key the value that it has in the next sample."""

    name = "other_value"

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        values = call.values.clone()
        values[:, :, 0] = call.values[:, :, 0].roll(-1, 0)
        return dataclasses.replace(call, values=values)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NullScore(HeadIntervention):
    """Give heads a null score, beside the one that they have."""

    name = "null_score"
    score: float = 0.0

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        given = call.queries.new_full(
            (1, call.num_heads, 1), self.score, dtype=torch.promote_types(call.queries.dtype, torch.float32)
        )
        return dataclasses.replace(call, sink_scores=given if call.sink_scores is None else call.sink_scores.logaddexp(given))


CASES = [
    [Added(heads={0: (1,)}, amount=1.5)],
    [Added(heads={0: (1,)}, place=2, amount=1.5), Added(heads={0: (1, 3)}, place=1, amount=-3.0)],
    [HideKey(heads={0: (0,)}), HideKey(heads={0: (3,)}, place=(1, 2))],
    [OtherValue(heads={0: (2,)}), Added(heads={0: (2,)}, place=3)],
    [Added(heads={0: (0,)}), HideKey(heads={0: (1,)}, spare=2), OtherValue(heads={0: (2,)})],
]


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("interventions", CASES, ids=lambda case: "+".join(one.name for one in case))
def test_the_merged_call_gives_the_outputs(kind, interventions):
    """Recomputed from the one call that probes see; each head's output is what it is when the head is edited alone."""
    call = make_call(**CALLS[kind])
    edited = edit(call, *interventions)
    recomputed = edited.call.outputs(0, LENGTH).transpose(1, 2)
    assert (recomputed - edited.outputs).abs().max() < ROUNDING
    assert (edited.call.weights(0, LENGTH) - edited.weights).abs().max() < ROUNDING
    for head in range(HEADS):
        own = [one for one in interventions if head in one.heads[0]]
        alone = edited_outputs(of_heads(call, [head]), own)[1][:, 0]
        assert (edited.outputs[:, :, head] - alone).abs().max() < ROUNDING
        if not own:
            assert torch.equal(edited.outputs[:, :, head], call.head_outputs[:, :, head])
    # What statistics are made of it agrees with its weights: bias, cap and null scores are read in one way everywhere.
    statistics = column_statistics(edited.call, frozenset({"columns", "mass"}))
    assert (statistics.column_sum - edited.weights.sum(2)).abs().max() < 1e-5  # statistics are float32
    assert (statistics.row_mass + statistics.null_mass - 1).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["plain", "null", "bias", "output bias and gate"])
def test_null_scores_of_some_heads(kind):
    call = make_call(**CALLS[kind])
    edited = edit(call, NullScore(heads={0: (1,)}, score=0.7), NullScore(heads={0: (2,)}, score=-0.3))
    assert (edited.call.outputs(0, LENGTH).transpose(1, 2) - edited.outputs).abs().max() < ROUNDING
    mass = edited.call.null_mass(0, LENGTH)
    assert (mass + edited.call.weights(0, LENGTH).sum(-1) - 1).abs().max() < ROUNDING
    if kind == "plain":
        assert (mass[:, [0, 3]] == 0).all()
        scores = call.scores(0, LENGTH)[:, 1].masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
        expected = 1 / (1 + (scores - 0.7).exp().sum(-1))
        assert (mass[:, 1] - expected).abs().max() < ROUNDING
    if kind == "null":  # two terms of one denominator
        scores = call.scores(0, LENGTH)[:, 2].masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
        nothing = torch.tensor([2.0, -0.3], dtype=torch.float64).exp().sum()
        assert (mass[:, 2] - nothing / (nothing + scores.exp().sum(-1))).abs().max() < ROUNDING


def test_null_and_its_value_of_some_heads():
    call = make_call(**CALLS["null value"])
    edited = edit(call, HideKey(heads={0: (1,)}, place="null"), ZeroValue(heads={0: (2,)}, place="null"))
    assert (edited.call.outputs(0, LENGTH).transpose(1, 2) - edited.outputs).abs().max() < ROUNDING
    mass = edited.call.null_mass(0, LENGTH)
    assert (mass[:, 1] == 0).all()
    assert (edited.call.null_value[2] == 0).all()
    assert torch.equal(edited.call.null_value[[0, 1, 3]], call.null_value[[0, 1, 3]])
    # A row that sees no key at all stays finite in the heads that have lost their null.
    nobody = dataclasses.replace(edited.call, visible=Causal() & _Nobody())
    assert nobody.weights(0, LENGTH).isfinite().all()


class _Nobody(Causal):
    def block(self, query_start, query_stop, key_start, key_stop):
        return torch.zeros(1, 1, query_stop - query_start, key_stop - key_start, dtype=torch.bool)


def test_grouped_queries_part_when_one_of_them_is_given_another_value():
    call = make_call()
    edited = edit(call, OtherValue(heads={0: (1,)}))
    assert call.groups == 2
    assert edited.call.groups == 1
    assert torch.equal(edited.call.values[:, 1, 0], call.values[:, 0, 0].roll(-1, 0))
    assert torch.equal(edited.call.values[:, 0], call.values[:, 0])
    assert torch.equal(edited.call.values[:, [2, 3]], call.values[:, [1, 1]])
    untouched = edit(call, HideKey(heads={0: (1,)}))  # nothing is copied that is not edited
    assert untouched.call.keys is call.keys
    assert untouched.call.queries is call.queries


def test_numbers_of_heads_follow_a_call_that_is_cut_down():
    call = make_call()
    part = of_heads(call, [3, 1])
    assert (call.head_numbers, part.head_numbers) == ((0, 1, 2, 3), (3, 1))
    assert of_heads(part, [1]).head_numbers == (1,)
    assert torch.equal(part.queries, call.queries[:, [3, 1]])
    assert torch.equal(part.keys, call.keys[:, [1, 0]])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_blocks_of_rows_of_any_size(rows, monkeypatch):
    call, interventions = make_call(), [HideKey(), Redirect(place=1), Added(place=2)]
    whole = edited_outputs(call, interventions, want_weights=True)
    monkeypatch.setattr("sinklab.attention.call.SCORES_AT_ONCE", rows * BATCH * HEADS * LENGTH)
    parts = edited_outputs(call, interventions, want_weights=True)
    assert (whole[1] - parts[1]).abs().max() < ROUNDING
    assert (whole[2] - parts[2]).abs().max() < ROUNDING


def test_weights_alone_need_not_be_recomputed():
    """An edit of outputs leaves the call as it is, and returned weights are the model's."""
    call = make_call()
    edited = edit(call, Scaled(heads={0: (1,)}, factor=0.0))
    assert edited.call.visible is call.visible
    assert (edited.weights - call.weights(0, LENGTH)).abs().max() < ROUNDING
    assert (edited.outputs[:, :, 1] == 0).all()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OtherOperation(HeadIntervention):
    """Changes what heads of one call share."""

    name = "other_operation"

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        return dataclasses.replace(call, operation=Sigmoid())


def test_an_operation_of_one_head_alone_cannot_be_shown():
    with pytest.raises(ContractError, match="on some of its heads may not change the operation"):
        edit(make_call(), OtherOperation(heads={0: (1,)}))
    assert edit(make_call(), OtherOperation()).call.operation == Sigmoid()


class _Outputs(Watcher):
    name, needs = "outputs", frozenset({"columns", "log_sum_exp", "entropy"})

    def __init__(self):
        self.calls = []

    def update(self, call, statistics):
        self.calls.append((call, statistics))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_statistics_of_an_edited_model_prove_themselves(name):
    """``attend`` checks statistics against the call; long enough for the fast ways of computing them."""
    model, probe = tiny_models()[name], _Outputs()
    tokens = torch.randint(1, 50, (2, 60), generator=torch.Generator().manual_seed(1))
    edits = [HideKey(heads={0: (1,)}), NullScore(heads={0: (3,)}), ZeroValue(heads={1: (0,)})]
    with torch.no_grad(), attend(model, [probe], edits, verify=True):
        model(input_ids=tokens)
    for call, statistics in probe.calls:
        weights = call.weights(0, call.q_len)
        assert (statistics.column_sum - weights.sum(2)).abs().max() < 1e-4  # sums of 60 float32 numbers below 1
