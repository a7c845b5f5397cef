"""A call: its own definition of its outputs, blocks of scores, and the product with a few chosen keys, whatever is hidden."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.attention.column_calls import make_call

from sinklab.attention import call as module
from sinklab.attention import chosen_keys
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.visibility import Causal


@pytest.mark.parametrize("part", ["null_value", "output_bias", "gain"])
def test_what_is_added_and_what_is_multiplied(part):
    """``gain · (weights · values + null mass · null value + bias)``, with each part alone and a sink logit beside it."""
    generator = torch.Generator().manual_seed(1)
    shape = {"null_value": (4, 8), "output_bias": (4, 8), "gain": (2, 4, 37, 1)}[part]
    tensor = torch.randn(*shape, generator=generator, dtype=torch.float64)
    call = make_call(operation={"name": "sink_logit"}, sink_scores=torch.ones(1, 4, 1, dtype=torch.float64), **{part: tensor})
    weights, null = call.signed_weights(0, 37), call.null_mass(0, 37)
    torch.testing.assert_close(weights.sum(-1) + null, torch.ones_like(null))
    plain = weights @ call.values
    if part == "gain":
        expected = plain * tensor
    else:
        expected = plain + tensor[:, None] * (null[..., None] if part == "null_value" else 1.0)
    torch.testing.assert_close(call.outputs(0, 37), expected)
    torch.testing.assert_close(call.outputs(5, 9), expected[:, :, 5:9])


@pytest.mark.parametrize(
    ("at_once", "multiple", "sizes"), [(10**9, 1, [37]), (600, 1, [2] * 18 + [1]), (1, 1, [1] * 37), (2400, 4, [8] * 4 + [5])]
)
def test_blocks_hold_as_many_rows_as_fit_and_one_at_least(monkeypatch, at_once, multiple, sizes):
    """A row has 2 samples × 4 heads × 37 keys = 296 scores."""
    monkeypatch.setattr(module, "SCORES_AT_ONCE", at_once)
    blocks = list(make_call().blocks(multiple))
    assert [stop - start for start, stop in blocks] == sizes
    assert [start for start, _ in blocks[1:]] == [stop for _, stop in blocks[:-1]]
    assert (blocks[0][0], blocks[-1][1]) == (0, 37)


def test_one_key_and_one_head_make_blocks_of_all_that_fits(monkeypatch):
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 3)
    assert list(make_call(batch=1, heads=1, kv_heads=1, q_len=1, kv_len=1).blocks()) == [(0, 1)]
    call = make_call(batch=1, heads=1, kv_heads=1, q_len=3, kv_len=1, visible=None)
    assert list(call.blocks()) == [(0, 3)]


def test_a_call_has_no_cached_keys_and_holds_scores_of_16_megabytes():
    assert make_call().cached_keys == 0
    assert module.SCORES_AT_ONCE == 2**22


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_product_is_what_each_query_computes(kv_heads):
    call = make_call(kv_heads=kv_heads, visible=Causal(), spread=2.0)
    documents = (torch.arange(37) // 13).expand(2, -1).clone()
    documents[1, :5] = -1  # padding on the left
    call = dataclasses.replace(
        call,
        query_documents=documents,
        key_documents=documents,
        key_positions=torch.where(documents < 0, -1, torch.arange(37) % 13),
    )
    indices = chosen_keys.keys_of_document(call, 0, 2, 40)
    assert indices[0, :13].unique(dim=0).tolist() == [[0, 2, -1]]
    assert indices[1, :13].unique(dim=0).tolist() == [[-1, -1, -1]]  # its first tokens are padding
    assert indices[0, 26:].unique(dim=0).tolist() == [[26, 28, -1]]
    distinct = indices.unique()[1:]
    few, own = chosen_keys._few_keys(call, indices, distinct), chosen_keys._gathered_keys(call, indices)
    assert torch.equal(few[1], own[1])
    # float64 sums of 8 products in another order
    torch.testing.assert_close(few[0].where(few[1], 0.0), own[0].where(own[1], 0.0), atol=1e-12, rtol=0)
    assert own[1].any()


def test_many_keys_are_gathered_and_few_are_not(monkeypatch):
    call, ways = make_call(visible=Causal()), []
    for name in ("_few_keys", "_gathered_keys"):
        way = getattr(chosen_keys, name)
        monkeypatch.setattr(chosen_keys, name, lambda *given, way=way, name=name: ways.append(name) or way(*given))
    own = torch.arange(37).expand(2, -1)[..., None]
    scores = chosen_keys.scores_of_keys(call, own)[0]
    torch.testing.assert_close(scores[..., 0], call.scores(0, 37).diagonal(dim1=2, dim2=3), atol=1e-12, rtol=0)
    chosen_keys.scores_of_keys(call, own % 4)
    assert ways == ["_gathered_keys", "_few_keys"]


def test_nothing_chosen_scores_nothing():
    scores, visible = chosen_keys.scores_of_keys(make_call(), torch.full((2, 37, 3), -1))
    assert scores.shape == (2, 4, 37, 3)
    assert not scores.any()
    assert not visible.any()


@pytest.mark.parametrize("spread", [1.0, 1e4, 1e10, 1e30])
def test_weights_are_shares_whatever_the_size_of_the_scores(spread):
    """In float32 the difference of a score of 1e10 to a log-sum-exp of 1e10 may be hundreds, and exp of it infinite."""
    call = make_call(dtype=torch.float32, visible=Causal(), spread=spread)
    log_sum_exp = column_statistics(call, frozenset({"log_sum_exp"}), method="blocked").log_sum_exp
    whole = call.weights(0, 37)
    own = chosen_keys.weights_on_own_keys(call, log_sum_exp)
    first = chosen_keys.weights_of_keys(call, chosen_keys.keys_of_document(call, 0), log_sum_exp)[..., 0]
    # Under 4,096 the exponent is rounded by a few times 4096 · 2⁻²⁴; beyond, weights are those of the whole rows.
    allowed = 4 * 2**-12 if spread <= 1e4 else 0.0
    torch.testing.assert_close(own, whole.diagonal(dim1=2, dim2=3), atol=allowed, rtol=0)
    torch.testing.assert_close(first, whole[..., 0], atol=allowed, rtol=0)
