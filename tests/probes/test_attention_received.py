"""Attention received: a hand-computed column mean, the whole matrix, and all the ways to lay the same documents out."""

import pytest
import torch
from dense_oracle import call_from_weights, dense_weights, make_call, show, values_of

from sinklab.attention.call import Statistics
from sinklab.errors import ContractError
from sinklab.probes.attention_received import AttentionReceived
from sinklab.registry import operations

MODULE = "layers.0.self_attn"


def test_three_tokens_by_hand():
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.3, 0.2]], dtype=torch.float64)
    found = values_of(show(AttentionReceived(), call_from_weights(weights)))
    # (1 + .25 + .5)/3, (.75 + .3)/2, .2/1; seen by 3, 2 and 1 queries
    for key, (value, count) in enumerate([(1.75 / 3, 3), (0.525, 2), (0.2, 1)]):
        assert found["mean_weight", MODULE, 0, key] == (pytest.approx(value, abs=1e-7), count)


@pytest.mark.parametrize("operation", ["softmax", "sigmoid"])
def test_packed_left_padded_grouped_queries_against_the_whole_matrix(operation):
    torch.manual_seed(0)
    call = make_call(
        torch.randn(2, 4, 9, 4), torch.randn(2, 2, 9, 4), lengths=[[6], [3, 5]], left=True, operation=operations[operation]()
    )
    found = values_of(show(AttentionReceived(), call))
    _, visible, weights = dense_weights(call)
    for head in range(4):
        for position in range(6):
            keys = torch.nonzero(call.key_positions == position).tolist()
            total = sum(weights[row, head, :, key].sum() for row, key in keys)
            count = sum(int(visible[row, head, :, key].sum()) for row, key in keys)
            # float32 column sums of at most 6 weights below one: 6 * 2**-24
            assert found["mean_weight", MODULE, head, position] == (pytest.approx(float(total) / count, abs=1e-6), count)


def test_cached_decoding_equals_one_prefill_and_merge_adds():
    torch.manual_seed(1)
    queries, keys = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    expected = values_of(show(AttentionReceived(), make_call(queries, keys)))
    prefill = show(AttentionReceived(), make_call(queries[:, :, :2], keys[:, :, :2]))
    steps = [make_call(queries[:, :, : n + 1], keys[:, :, : n + 1], cached=n) for n in range(2, 6)]
    decoded = show(AttentionReceived(), *steps)
    prefill.merge(decoded)
    found = values_of(prefill)
    assert {key: count for key, (_, count) in found.items()} == {key: count for key, (_, count) in expected.items()}
    assert [found[key][0] for key in expected] == pytest.approx([value for value, _ in expected.values()], rel=1e-6)


def test_a_call_without_its_statistics_is_refused():
    call = call_from_weights(torch.eye(2, dtype=torch.float64))
    with pytest.raises(ContractError, match="without column_sum, column_count"):
        AttentionReceived().update(call, Statistics())
