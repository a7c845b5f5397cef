"""Chosen keys: the product with a few keys is what every query computes with its own, whatever is packed, padded or hidden."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.attention.column_calls import make_call

from sinklab.attention import chosen_keys
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.visibility import Causal


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
