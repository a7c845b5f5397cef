"""Scores and angles of queries and keys: by hand, and against all pairs."""

import math

import pytest
import torch
from dense_oracle import assert_same, dense_weights, make_call, show, values_of

from sinklab.attention.visibility import Causal, Keys, Window
from sinklab.probes import _shared
from sinklab.probes.max_logit import MaxLogit
from sinklab.probes.query_key_angle import QueryKeyAngle
from sinklab.probes.score_gap import ScoreGap
from sinklab.registry import operations

MODULE = "layers.0.self_attn"


def test_angle_by_hand():
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


def scores_call(scores: torch.Tensor, **fields):
    """One head whose scores are given: keys are unit vectors."""
    size = scores.shape[-1]
    return make_call(scores[None, None], torch.eye(size)[None, None], scaling=1.0, **fields)


def test_gap_by_hand():
    call = scores_call(torch.tensor([[9.0, 0.0, 0.0], [2.0, 1.0, 0.0], [3.0, 1.0, 0.0]]))
    found = values_of(show(ScoreGap(), call))
    # query 0 sees the sink alone and is left out; query 1: 2 against 1; query 2: 3 against 1 and 0
    assert found["sink_score", MODULE, 0, None] == (pytest.approx(2.5), 2)
    assert found["other_score", MODULE, 0, None] == (pytest.approx((1 + 0.5) / 2), 2)
    assert found["gap", MODULE, 0, None] == (pytest.approx((1 + 2.5) / 2), 2)
    rest = math.log(math.e + 1)
    assert found["gap_to_rest_lse", MODULE, 0, None] == (pytest.approx((1 + 3 - rest) / 2, abs=1e-6), 2)
    weights = [math.e / (math.e + 1), math.exp(3) / (math.exp(3) + math.e + 1)]
    assert found["sink_weight", MODULE, 0, None] == (pytest.approx(sum(weights) / 2, abs=1e-6), 2)
    # the logit of the weight
    logits = [math.log(p / (1 - p)) for p in weights]
    assert found["gap_to_rest_lse", MODULE, 0, None][0] == pytest.approx(sum(logits) / 2, abs=1e-6)


def test_a_sink_whose_weight_is_one_in_float32():
    # 25 against -10: the weight differs from one by 6e-16, and float32 weights cannot tell 35 from 17.
    found = values_of(show(ScoreGap(), scores_call(torch.tensor([[0.0, 0.0], [25.0, -10.0]]))))
    assert found["sink_weight", MODULE, 0, None][0] == 1.0
    assert found["gap_to_rest_lse", MODULE, 0, None] == (pytest.approx(35.0, abs=1e-5), 1)


def test_sigmoid_has_scores_but_no_logit():
    found = values_of(show(ScoreGap(), scores_call(torch.tensor([[0.0, 0.0], [2.0, 1.0]]), operation=operations["sigmoid"]())))
    assert found["gap", MODULE, 0, None] == (pytest.approx(1.0), 1)
    assert found["sink_weight", MODULE, 0, None][0] == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-6)
    assert not [key for key in found if key[0] == "gap_to_rest_lse"]


@pytest.mark.parametrize("sharpness", [0.5, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lengths": [[6], [3, 5]], "left": True},
        {"window": 3},
        {"softcap": 4.0},
        {"bias": torch.linspace(-2, 2, 4 * 81).view(1, 4, 9, 9)},
        {"sink_scores": torch.tensor([0.5, -1.0, 2.0, 0.0]).view(1, 4, 1)},
    ],
    ids=["plain", "packed", "window", "softcap", "bias", "sink-logits"],
)
@pytest.mark.parametrize("sink_position", [0, 1])
def test_gap_against_all_pairs(options, sharpness, sink_position):
    torch.manual_seed(0)
    call = make_call(torch.randn(2, 4, 9, 4) * sharpness, torch.randn(2, 2, 9, 4) * sharpness, **options)
    found = values_of(show(ScoreGap(sink_position=sink_position), call))
    scores, visible, weights = dense_weights(call)
    shown, counted = values_of(show(MaxLogit(), call)), call.counted[:, None, :, None]
    expected = scores.masked_fill(~(visible & counted), -math.inf).amax((0, 2, 3)).tolist()
    assert [shown["max_logit", MODULE, head, None][0] for head in range(4)] == pytest.approx(expected, abs=2e-5)
    assert shown["max_logit", None, None, None] == (
        max(shown["max_logit", MODULE, head, None][0] for head in range(4)),
        4 * int(counted.sum()),
    )
    for head in range(4):
        lists: dict[str, list[float]] = {
            "sink_score": [],
            "other_score": [],
            "gap": [],
            "gap_to_rest_lse": [],
            "sink_weight": [],
        }
        for row, query in torch.nonzero(call.counted).tolist():
            sink = (call.key_positions[row] == sink_position) & (call.key_documents[row] == call.query_documents[row, query])
            seen = visible[row, head, query]
            others = scores[row, head, query][seen & ~sink]
            if not (seen & sink).any() or not len(others):
                continue
            score = float(scores[row, head, query][sink])
            lists["sink_score"].append(score)
            lists["other_score"].append(float(others.mean()))
            lists["gap"].append(score - float(others.mean()))
            lists["gap_to_rest_lse"].append(score - float(torch.logsumexp(others, 0)))
            lists["sink_weight"].append(float(weights[row, head, query][sink]))
        for metric, values in lists.items():
            # Scores reach 200: float32 rounds them by 200 * 2**-24 = 1e-5. The identity for the logit divides the rounding of
            # score - LSE, 1e-5, by the share of the rest, at least 1e-3: 1e-2 in a single row.
            tolerance = {"gap_to_rest_lse": 1e-2}.get(metric, 1e-4)
            assert found[metric, MODULE, head, None] == (pytest.approx(sum(values) / len(values), abs=tolerance), len(values))
