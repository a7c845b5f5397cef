"""The identity kernel: the score is the weight."""

from __future__ import annotations

import pytest
import torch

from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.visibility import Causal
from sinklab.errors import ConfigurationError
from sinklab.operations.identity import Identity
from sinklab.registry import operations
from sinklab.testing import check_operation

CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
SCORES = torch.tensor([[2.0, 9.0, 9.0], [0.25, -0.5, 9.0], [3.0, -5.0, 1.0]])
# Row sums are 2, -0.25 and -1: divided by 2, by 1 because that is larger, and by |-1|.
DIVIDED = torch.tensor([[1.0, 0.0, 0.0], [0.25, -0.5, 0.0], [3.0, -5.0, 1.0]])


def test_three_tokens_by_hand():
    scores = SCORES[None, None]
    assert torch.equal(Identity().weights(scores, CAUSAL)[0, 0], SCORES.tril())
    assert torch.equal(Identity(normalize=True).weights(scores, CAUSAL)[0, 0], DIVIDED)
    assert torch.equal(Identity(normalize=True).weights(2 * scores, CAUSAL)[0, 0, 2], DIVIDED[2])  # by |-2|
    assert Identity().null_mass(scores, CAUSAL) is None


def test_outputs_are_linear_in_the_queries():
    queries, keys, values = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    once, _ = Identity().head_outputs(queries, keys, values, None, 0.5)
    thrice, _ = Identity().head_outputs(3 * queries, keys, values, None, 0.5)
    torch.testing.assert_close(thrice, 3 * once, atol=1e-12, rtol=0)
    torch.testing.assert_close(once, 0.5 * queries @ (keys.mT @ values), atol=1e-12, rtol=0)


def test_rows_are_not_normalized_either_way():
    for normalize in (False, True):
        operation = Identity(normalize=normalize)
        assert operation.signed
        assert not operation.normalized
        assert operations.make(operation.to_dict()) == operation


def test_share_of_a_key_takes_absolute_values():
    """Gu et al.'s proxy for signed weights, |w| / sum of |w|, on rows of two keys."""
    queries, keys = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1), torch.tensor([2.0, -6.0]).view(1, 1, 2, 1)
    positions = torch.arange(2)[None]
    call = AttentionCall(
        site=Site("attention", 0),
        queries=queries,
        keys=keys,
        values=keys,
        scaling=1.0,
        visible=Causal(),
        operation=Identity(),
        query_positions=positions,
        key_positions=positions,
        query_documents=torch.zeros_like(positions),
        key_documents=torch.zeros_like(positions),
    )
    statistics = column_statistics(call)
    # Scores 2; 6, -18: shares 1; 1/4, 3/4.
    torch.testing.assert_close(statistics.column_share.flatten(), torch.tensor([1.25, 0.75]))


def test_contract_with_normalisation():
    check_operation(Identity(normalize=True))


def test_unknown_setting():
    with pytest.raises(ConfigurationError, match="operation 'identity' has no setting 'bias'; it has normalize"):
        operations.make({"name": "identity", "bias": 1.0})
