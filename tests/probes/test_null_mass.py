"""Mass on nothing: by hand with a sink logit, zero for plain softmax, absent where it is not defined."""

import pytest
import torch
from dense_oracle import make_call, show, values_of

from sinklab.probes.null_mass import NullMass
from sinklab.registry import operations

MODULE = "layers.0.self_attn"


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
