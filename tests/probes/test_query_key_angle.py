"""Query-key angle: three tokens by hand, then every layout against cosines of all pairs."""

import pytest
import torch
from dense_oracle import assert_same, dense_weights, make_call, show, values_of

from sinklab.attention.visibility import Causal, Keys, Window
from sinklab.probes import _shared
from sinklab.probes.query_key_angle import QueryKeyAngle

MODULE = "layers.0.self_attn"


def test_three_tokens_by_hand():
    queries = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])[None, None]
    keys = torch.tensor([[0.0, 2.0], [1.0, 0.0], [-4.0, 0.0]])[None, None]
    found = values_of(show(QueryKeyAngle(), make_call(queries, keys, scaling=0.5)))
    # key 0 is seen by all: cosines 0, 1, 0; norm products 2, 4, 6; q·k 0, 4, 0, halved by the scaling
    assert found["cosine", MODULE, 0, 0] == (pytest.approx(1 / 3), 3)
    assert found["norm_product", MODULE, 0, 0] == (pytest.approx(4.0), 3)
    assert found["score", MODULE, 0, 0] == (pytest.approx(2 / 3), 3)
    # key 1 by queries 1 and 2: cosines 0, 1; products 2, 3; q·k 0, 3
    assert found["cosine", MODULE, 0, 1] == (pytest.approx(0.5), 2)
    assert found["norm_product", MODULE, 0, 1] == (pytest.approx(2.5), 2)
    assert found["score", MODULE, 0, 1] == (pytest.approx(0.75), 2)
    # key 2 by query 2 alone: straight against it
    assert found["cosine", MODULE, 0, 2] == (pytest.approx(-1.0), 1)
    assert found["score", MODULE, 0, 2] == (pytest.approx(-6.0), 1)


def all_pairs(call):
    queries, keys = call.queries.double(), call.keys.double().repeat_interleave(call.groups, 1)
    cosines = torch.nn.functional.cosine_similarity(queries[:, :, :, None], keys[:, :, None], dim=-1)
    products = queries.norm(dim=-1)[..., None] * keys.norm(dim=-1)[:, :, None]
    scores = queries @ keys.transpose(2, 3) * call.scaling
    visible = dense_weights(call)[1] & call.counted[:, None, :, None]
    expected = {}
    for metric, values in (("cosine", cosines), ("norm_product", products), ("score", scores)):
        for head in range(call.num_heads):
            for position in range(int(call.key_positions.max()) + 1):
                seen = visible[:, head] & (call.key_positions == position)[:, None]
                if seen.any():
                    expected[metric, MODULE, head, position] = (float(values[:, head][seen].mean()), int(seen.sum()))
    return expected


@pytest.mark.parametrize("options", [{}, {"lengths": [[6], [3, 5]], "left": True}, {"window": 3}, {"cached": 4}], ids=str)
@pytest.mark.parametrize("tile", [2, 256])
def test_against_all_pairs(options, tile, monkeypatch):
    monkeypatch.setattr(_shared, "TILE", tile)
    torch.manual_seed(0)
    call = make_call(torch.randn(2, 4, 9, 4), torch.randn(2, 2, 9, 4), **options)
    # float32 sums of at most 9 terms; small means come from terms of size one, hence the floor of assert_same
    assert_same(values_of(show(QueryKeyAngle(), call)), all_pairs(call), rel=1e-3)


def test_index_rules_over_several_tiles(monkeypatch):
    monkeypatch.setattr(_shared, "TILE", 4)
    torch.manual_seed(1)
    call = make_call(torch.randn(1, 2, 21, 4), torch.randn(1, 1, 21, 4))
    call.visible = Causal() & Window(9) & Keys(torch.ones(1, 21, dtype=torch.bool))
    assert_same(values_of(show(QueryKeyAngle(), call)), all_pairs(call), rel=1e-3)


def test_zero_vectors_have_no_angle():
    found = values_of(show(QueryKeyAngle(), make_call(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2))))
    assert found["cosine", MODULE, 0, 0] == (0.0, 2)


def test_padding_queries_that_see_keys_do_not_count():
    # A host's causal mask lets padding on the right look at the tokens before it.
    torch.manual_seed(3)
    call = make_call(torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4), lengths=[[4], [6]])
    call.visible = Causal() & Keys(call.key_positions >= 0)
    assert_same(values_of(show(QueryKeyAngle(), call)), all_pairs(call), rel=1e-3)
