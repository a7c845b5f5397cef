"""What is read off weights: attention received, entropy, mass on nothing, and heads' outputs, by hand and of whole matrices."""

import math

import pytest
import torch
from dense_oracle import call_from_weights, dense_weights, make_call, show, values_of

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.errors import ConfigurationError, ContractError
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.entropy import Entropy
from sinklab.probes.head_output import HeadOutput
from sinklab.probes.null_mass import NullMass
from sinklab.registry import operations

MODULE = "layers.0.self_attn"


def test_received_by_hand():
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


def test_cached_decoding_equals_one_prefill():
    torch.manual_seed(1)
    queries, keys = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    expected = values_of(show(AttentionReceived(), make_call(queries, keys)))
    prefill = make_call(queries[:, :, :2], keys[:, :, :2])
    steps = [make_call(queries[:, :, : n + 1], keys[:, :, : n + 1], cached=n) for n in range(2, 6)]
    found = values_of(show(AttentionReceived(), prefill, *steps))
    assert {key: count for key, (_, count) in found.items()} == {key: count for key, (_, count) in expected.items()}
    assert [found[key][0] for key in expected] == pytest.approx([value for value, _ in expected.values()], rel=1e-6)


def test_a_call_without_its_statistics_is_refused():
    call = call_from_weights(torch.eye(2, dtype=torch.float64))
    with pytest.raises(ContractError, match="without column_sum, column_count"):
        AttentionReceived().update(call, Statistics())


def test_entropy_by_hand():
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)
    found = values_of(show(Entropy(), call_from_weights(weights)))
    # rows: 0, ln 2, (1/2) ln 2 + 2 (1/4) ln 4 = 1.5 ln 2
    assert found["entropy", MODULE, 0, None] == (pytest.approx(2.5 * math.log(2) / 3, abs=1e-6), 3)
    # without key 0: row 0 has nothing left, row 1 is certain (0), row 2 is two halves (ln 2)
    assert found["entropy_without_sink", MODULE, 0, None] == (pytest.approx(math.log(2) / 2, abs=1e-5), 2)
    assert found["sink_column_weight", MODULE, 0, None] == (pytest.approx(2 / 3, abs=1e-6), 3)


def test_another_sink_position_by_hand():
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.5, 0.25]], dtype=torch.float64)
    found = values_of(show(Entropy(sink_position=1), call_from_weights(weights)))
    # row 0 does not see key 1 and keeps its entropy 0, row 1 is certain without it, row 2 is two halves: (0 + 0 + ln 2)/3
    assert found["entropy_without_sink", MODULE, 0, None] == (pytest.approx(math.log(2) / 3, abs=1e-5), 3)
    assert found["sink_column_weight", MODULE, 0, None][0] == pytest.approx(1 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("operation", "options"),
    [
        ("softmax", {}),
        ("softmax", {"sink_scores": torch.tensor([0.5, -1.0, 2.0, 0.0]).view(1, 4, 1)}),
        ("softmax", {"left": True, "lengths": [[6], [3, 4]]}),
        ("softmax", {"window": 3}),
        ("sigmoid", {}),
        ("sigmoid", {"left": True, "lengths": [[6], [3, 4]]}),
    ],
    ids=["plain", "sink-logits", "packed", "window", "sigmoid", "sigmoid-packed"],
)
def test_against_renormalised_dense_rows(operation, options):
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 4, 7, 4), torch.randn(2, 2, 7, 4)
    call = make_call(queries, keys, operation=operations[operation](), **options)
    found = values_of(show(Entropy(), call))
    _, _, weights = dense_weights(call)
    for head in range(4):
        whole, rest = [], []
        for row, query in torch.nonzero(call.counted).tolist():
            line = weights[row, head, query]
            first = int(
                ((call.key_positions[row] == 0) & (call.key_documents[row] == call.query_documents[row, query])).nonzero()
            )
            others = torch.cat((line[:first], line[first + 1 :]))
            whole.append(float(torch.special.entr(line / line.sum()).sum()))
            if others.sum() / line.sum() >= 1e-3:
                rest.append(float(torch.special.entr(others / others.sum()).sum()))
        assert found["entropy", MODULE, head, None] == (pytest.approx(sum(whole) / len(whole), abs=1e-5), len(whole))
        # float32 statistics, 1e-6 each, divided by the smallest share of the rest, 1e-3 at worst
        assert found["entropy_without_sink", MODULE, head, None] == (pytest.approx(sum(rest) / len(rest), abs=1e-3), len(rest))


def test_rows_that_leave_nothing_are_left_out():
    # Row 1 leaves 1e-6 to the other key: the identity would divide rounding errors by it.
    weights = torch.tensor([[1.0, 0.0], [1 - 1e-6, 1e-6]], dtype=torch.float64)
    found = values_of(show(Entropy(), call_from_weights(weights)))
    assert ("entropy_without_sink", MODULE, 0, None) not in found
    assert found["entropy", MODULE, 0, None][1] == 2


def test_no_sink_stands_before_the_first_token():
    with pytest.raises(ConfigurationError, match="sink_position -1 must be 0 or more: positions count from the first token"):
        Entropy(sink_position=-1)


def zeros(operation=None, **fields):
    return make_call(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), operation=operation, **fields)


def test_sink_logit_by_hand():
    # Scores 0; a sink logit of 0 adds one to the denominator: null mass 1/2, 1/3, 1/4. Head 1 has ln 3: 3/4, 3/5, 3/6.
    found = values_of(show(NullMass(), zeros(sink_scores=torch.log(torch.tensor([1.0, 3.0])).view(1, 2, 1))))
    first, second = (1 / 2 + 1 / 3 + 1 / 4) / 3, (3 / 4 + 3 / 5 + 3 / 6) / 3
    assert found["null_mass", MODULE, 0, None] == (pytest.approx(first, abs=1e-6), 3)
    assert found["null_mass", MODULE, 1, None] == (pytest.approx(second, abs=1e-6), 3)
    assert found["row_mass", MODULE, 0, None] == (pytest.approx(1 - first, abs=1e-6), 3)
    assert found["null_mass", None, None, None] == (pytest.approx((first + second) / 2, abs=1e-6), 6)


@pytest.mark.parametrize("logit", [20.0, -20.0])
def test_extreme_sink_logits(logit):
    found = values_of(show(NullMass(), zeros(sink_scores=torch.full((1, 2, 1), logit))))
    assert found["null_mass", None, None, None][0] == pytest.approx(1.0 if logit > 0 else 0.0, abs=1e-6)


def test_plain_softmax_keeps_all_mass():
    found = values_of(show(NullMass(), zeros()))
    assert found["null_mass", None, None, None][0] == 0.0
    assert found["row_mass", None, None, None][0] == pytest.approx(1.0, abs=1e-6)


def test_sigmoid_has_a_row_mass_and_no_null_mass():
    found = values_of(show(NullMass(), zeros(operations["sigmoid"]())))
    # sigmoid(0) on 1, 2 and 3 keys: .5, 1, 1.5
    assert found["row_mass", MODULE, 0, None] == (pytest.approx(1.0), 3)
    assert not [key for key in found if key[0] == "null_mass"]


def call_of(outputs: torch.Tensor, projection=None, residual=None, **options) -> AttentionCall:
    batch, q_len, heads, _ = outputs.shape
    zeros = torch.zeros(batch, heads, q_len, 2)
    return make_call(zeros, zeros, head_outputs=outputs, projection=projection, residual=residual, **options)


def test_head_output_by_hand():
    outputs = torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]], [[2.0, 0.0]]])[None]  # one head of size two
    projection = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])  # (3, 2): doubles the second coordinate
    residual = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, 4.0, 0.0]])[None]
    found = values_of(show(HeadOutput(), call_of(outputs, projection, residual)))
    # before: 5, 1, 2; after: |(3, 8)| = sqrt 73, 2, 2; relative: sqrt 73 / 1, 2/2, 2/4
    assert found["head_norm", MODULE, 0, None] == (pytest.approx(8 / 3), 3)
    assert found["output_norm", MODULE, 0, None] == (pytest.approx((73**0.5 + 4) / 3), 3)
    assert found["relative_norm", MODULE, 0, None] == (pytest.approx((73**0.5 + 1.5) / 3), 3)


@pytest.mark.parametrize("options", [{}, {"lengths": [[4], [2, 3]], "left": True}], ids=str)
def test_against_contributions_formed_one_by_one(options):
    torch.manual_seed(0)
    outputs, projection, residual = torch.randn(2, 6, 3, 4), torch.randn(10, 12), torch.randn(2, 6, 10)
    call = call_of(outputs, projection, residual, **options)
    found = values_of(show(HeadOutput(), call))
    for head in range(3):
        written = outputs[:, :, head] @ projection[:, 4 * head : 4 * head + 4].T
        ratio = written.norm(dim=-1) / residual.norm(dim=-1)
        count = int(call.counted.sum())
        assert found["output_norm", MODULE, head, None] == (
            pytest.approx(float(written.norm(dim=-1)[call.counted].mean()), rel=1e-5),
            count,
        )
        assert found["relative_norm", MODULE, head, None] == (pytest.approx(float(ratio[call.counted].mean()), rel=1e-5), count)


def test_what_is_unknown_is_absent():
    outputs = torch.randn(1, 3, 2, 4)
    assert {key[0] for key in values_of(show(HeadOutput(), call_of(outputs)))} == {"head_norm"}
    without_residual = values_of(show(HeadOutput(), call_of(outputs, torch.randn(5, 8))))
    assert {key[0] for key in without_residual} == {"head_norm", "output_norm"}


def test_a_projection_of_another_shape_is_refused():
    with pytest.raises(ContractError, match=r"has 7 columns, expected num_heads \* value_dim = 8"):
        show(HeadOutput(), call_of(torch.randn(1, 3, 2, 4), torch.randn(5, 7)))
    bare = call_of(torch.randn(1, 3, 2, 4))
    bare.head_outputs = None
    with pytest.raises(ContractError, match="without head outputs"):
        HeadOutput().update(bare, Statistics())
