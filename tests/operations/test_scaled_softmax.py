"""Scaled softmax: rows that sum to alpha, which is an output map times alpha, and is measured as a gain."""

from __future__ import annotations

import math

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.operations.scaled_softmax import ScaledSoftmax
from sinklab.operations.softmax import Softmax
from sinklab.probes.null_mass import NullMass
from sinklab.registry import operations
from sinklab.testing import check_operation


def test_contract():
    check_operation(ScaledSoftmax(alpha=2.0))


def test_three_tokens_by_hand():
    queries, keys = torch.tensor([[1.0], [1.0], [1.0]])[None, None], torch.log(torch.tensor([[1.0], [3.0], [4.0]]))[None, None]
    outputs, _ = ScaledSoftmax(alpha=0.2).head_outputs(
        queries, keys, torch.ones(1, 1, 3, 1), torch.ones(3, 3, dtype=torch.bool).tril(), 1.0
    )
    torch.testing.assert_close(
        outputs.flatten(), torch.full((3,), 0.2), rtol=0, atol=1e-7
    )  # values of one: the sums of the rows


def test_it_is_softmax_with_the_output_map_times_alpha():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    outputs, weights = ScaledSoftmax(alpha=0.05).head_outputs(queries, keys, values, None, 0.5)
    plain, same = Softmax().head_outputs(queries, keys, values, None, 0.5)
    assert torch.equal(weights, same)
    assert torch.equal(outputs, plain * 0.05)  # in float64: alpha was not rounded on the way


def test_alpha_is_measured_as_the_gain():
    model = make_sinklm({"name": "scaled_softmax", "alpha": 0.25})
    with torch.no_grad(), attend(model, probes=[NullMass()]) as session:
        model(input_ids=torch.arange(24).view(2, 12))
    table = session.table()
    means = table[table["head"].notna()].groupby("metric")["value"].agg(["min", "max"])
    assert means.loc["output_gain"].tolist() == [0.25, 0.25]
    assert means.loc["row_mass"].tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert means.loc["null_mass"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_alpha_that_cannot_take_effect(alpha):
    with pytest.raises(ConfigurationError, match=f"operation 'scaled_softmax': alpha = {alpha} must be a positive number"):
        ScaledSoftmax(alpha=alpha)


def test_round_trip():
    assert operations.make({"name": "scaled_softmax", "alpha": 0.05}) == ScaledSoftmax(alpha=0.05)
