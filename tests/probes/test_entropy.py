"""Entropy with and without the sink column: by hand, against renormalised dense rows, and where the identity has no digits."""

import math

import pytest
import torch
from dense_oracle import call_from_weights, dense_weights, make_call, show, values_of

from sinklab.errors import ConfigurationError
from sinklab.probes.entropy import Entropy
from sinklab.registry import operations

MODULE = "layers.0.self_attn"


def test_three_tokens_by_hand():
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


def test_another_position_is_not_merged():
    with pytest.raises(ConfigurationError, match="sink_position 0 and 2 measure different things"):
        Entropy().merge(Entropy(sink_position=2))


def test_no_sink_stands_before_the_first_token():
    with pytest.raises(ConfigurationError, match="sink_position -1 must be 0 or more: positions count from the first token"):
        Entropy(sink_position=-1)
