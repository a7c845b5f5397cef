"""The proof of a call: what rounding can do passes, at any length; what it cannot do is refused, and says by how much."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re

import pytest
import torch
from tests.attention.column_calls import make_call
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.verify import verify_call, verify_statistics
from sinklab.attention.visibility import Causal, Keys
from sinklab.errors import MeasurementError

EPS = torch.finfo(torch.float32).eps


def answered(call: AttentionCall, outputs: Tensor | None = None) -> AttentionCall:
    """The call with head outputs ``(batch, num_heads, q_len, value_dim)``, by default those of its own definition."""
    outputs = call.outputs(0, call.q_len) if outputs is None else outputs
    return dataclasses.replace(call, head_outputs=outputs.transpose(1, 2))


def test_sums_of_many_equal_terms_pass_as_far_as_float32_can_sum_them():
    """One token repeated under even attention: every addition is rounded to the same side, so errors grow with the length."""
    call = make_call(batch=1, heads=2, kv_heads=2, q_len=1000, dtype=torch.float32)
    call.queries = torch.zeros_like(call.queries)
    call.values = call.values[:, :, :1].abs().add(0.5).expand_as(call.values).contiguous()
    kernel = scaled_dot_product_attention(call.queries, call.keys, call.values, is_causal=True, scale=call.scaling)
    truth, row = call.values[:, :, 0].double(), call.outputs(999, 1000)[:, :, 0].double()
    far = float(((kernel[:, :, -1].double() - row).abs() / call.values.amax()).max()) / EPS
    assert far > 32  # which was all that was allowed
    # Either way is within the bound of two sums of 1000 terms; it is the product of one row that needs most of its own.
    for found in (kernel[:, :, -1].double(), row):
        assert ((found - truth).abs() <= 1000 * EPS * truth).all()
    assert (kernel[:, :, -1].double() - truth).abs().max() < (row - truth).abs().max()
    rows, largest = verify_call(answered(call, kernel))
    assert rows == 4
    assert 0 < largest < 0.2


def test_one_key_of_a_thousand_that_is_lost_shows():
    call = make_call(batch=1, heads=2, kv_heads=2, q_len=1024, dtype=torch.float32)
    visible = torch.ones(1024, 1024, dtype=torch.bool).tril()
    visible[:, 5] = False
    lost = scaled_dot_product_attention(call.queries, call.keys, call.values, attn_mask=visible, scale=call.scaling)
    with pytest.raises(MeasurementError, match=r"layers\.0\.attention: recomputing query 341 .* times what rounding allows"):
        verify_call(answered(call, lost))


@pytest.mark.parametrize(("q_len", "rows"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (37, [0, 12, 24, 36])])
def test_which_rows_are_compared(q_len, rows):
    call = make_call(batch=2, q_len=q_len)
    outputs = call.outputs(0, q_len)
    assert verify_call(answered(call))[0] == 2 * len(rows)
    found = []
    for query in range(q_len):
        wrong = outputs.clone()
        wrong[1, 3, query, 2] += 1.0
        try:
            verify_call(answered(call, wrong))
        except MeasurementError as error:
            found.append(int(re.search(r"recomputing query (\d+) .* by 1, ", str(error))[1]))
    assert found == rows


def test_an_error_is_said_in_units_of_what_is_allowed():
    """One key of weight 1, score s and value v: eps · (32 + 4 |s|) · |v| are allowed, and 2 · eps · |v| for sums. A key that is
    hidden counts for nothing, whatever its score."""
    for dtype, eps in ((torch.float32, EPS), (torch.float64, EPS), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        seen = Keys(torch.tensor([[True, False]]))
        call = make_call(batch=1, heads=1, kv_heads=1, q_len=1, kv_len=2, spread=0.1, dtype=dtype, visible=seen)
        call.values = torch.full_like(call.values, 0.25)
        call.keys[:, :, 1] *= 50
        score, hidden = call.scores(0, 1).abs().flatten().tolist()
        assert score < 0.2 < 1 < hidden
        allowed = eps * (32 + 4 * score) * 0.25 + 2 * EPS * 0.25
        assert verify_call(answered(call)) == (1, 0.0)
        outputs = call.outputs(0, 1).to(torch.promote_types(dtype, torch.float32))
        near = dataclasses.replace(call, head_outputs=(outputs + 0.9 * allowed).transpose(1, 2).to(torch.float64))
        assert verify_call(near)[1] == pytest.approx(0.9, rel=0.05)
        far = dataclasses.replace(near, head_outputs=(outputs + 1.2 * allowed).transpose(1, 2).to(torch.float64))
        with pytest.raises(MeasurementError, match=r"1\.[12]\d? times what rounding allows"):
            verify_call(far)


def test_what_is_allowed_grows_with_gain_null_value_and_bias():
    plain = make_call(batch=1, heads=2, kv_heads=1, q_len=1, dtype=torch.float32)
    plain.values = torch.full_like(plain.values, 0.5)
    off = answered(plain, plain.outputs(0, 1) + 2e-4)
    with pytest.raises(MeasurementError):
        verify_call(off)
    for fields in (
        {"gain": torch.tensor(100.0)},
        {"output_bias": torch.full((2, 8), -100.0)},
        {"null_value": torch.full((2, 8), 100.0), "sink_scores": torch.full((1, 2, 1), -5.0)},
    ):
        wide = dataclasses.replace(plain, head_outputs=None, **fields)
        exact = answered(wide)
        assert verify_call(exact)[1] < 1e-3
        assert 0 < verify_call(dataclasses.replace(exact, head_outputs=exact.head_outputs + 2e-4))[1] < 1
    small = dataclasses.replace(plain, head_outputs=None, gain=torch.tensor(0.01))  # a small one makes nothing stricter
    exact = answered(small)
    assert verify_call(dataclasses.replace(exact, head_outputs=exact.head_outputs + 1e-6))[1] < 1


def test_outputs_that_are_no_numbers_are_refused():
    call = make_call(batch=1, dtype=torch.float32)
    with pytest.raises(MeasurementError, match="nan times what rounding allows; the module computes something that sinklab"):
        verify_call(answered(call, torch.full_like(call.outputs(0, 37), math.nan)))


def test_a_model_whose_own_numbers_are_none_is_said_to():
    call = make_call(batch=1, dtype=torch.float32)
    call.values[0, 0, 20] = math.nan  # as of padding that eager attention in float64 gives no row
    with pytest.raises(MeasurementError, match="queries, keys or values of the model are NaN for query 0, so"):
        verify_call(answered(call))


def test_a_call_without_outputs_is_refused():
    with pytest.raises(MeasurementError, match=r"^layers\.0\.attention: the attention function returned no outputs to verify"):
        verify_call(make_call())


def test_padding_and_queries_that_see_nothing_are_not_compared():
    counted = torch.ones(2, 37, dtype=torch.bool)
    counted[1, :13] = False
    call = make_call(counted=counted, visible=Causal(0) & Keys(counted))
    outputs = call.outputs(0, 37)
    outputs[1, :, :13] = 77.0  # padding: as the backend pleases
    rows, largest = verify_call(answered(call, outputs))
    assert (rows, round(largest, 6)) == (6, 0.0)
    # A counted query of which one head alone sees nothing is compared; one without any visible key is not.
    call.visible = Causal(-1)
    assert verify_call(answered(call, call.outputs(0, 37)))[0] == 5
    nothing = dataclasses.replace(call, visible=Keys(torch.zeros(2, 37, dtype=torch.bool)))
    assert verify_call(answered(nothing)) == (0, 0.0)


# --- the mass --------------------------------------------------------------------------------------------------------------


def test_statistics_without_columns_prove_nothing_and_pass():
    verify_statistics(make_call(), Statistics())


@pytest.mark.parametrize("lost", [0.02, -0.02])
def test_mass_that_is_missing_or_too_much_is_refused(lost):
    call = make_call(dtype=torch.float32)
    statistics = column_statistics(call)
    verify_statistics(call, statistics)
    statistics.column_sum = statistics.column_sum.clone()
    statistics.column_sum[1, 2, 7] += lost
    message = r"layers\.0\.attention: mass on keys and null mass differ from the 37 units that its queries spend by 0\.02"
    with pytest.raises(MeasurementError, match=message):
        verify_statistics(call, statistics)


def test_how_much_mass_may_be_missing():
    """64 units in the last place of each of 37 queries."""
    call = make_call(dtype=torch.float32)
    statistics = column_statistics(
        dataclasses.replace(call, **{name: getattr(call, name).double() for name in ("queries", "keys")})
    )
    for share, outcome in ((0.95, contextlib.nullcontext()), (1.05, pytest.raises(MeasurementError))):
        off = dataclasses.replace(statistics, column_sum=statistics.column_sum.clone())
        off.column_sum[0, 0, 0] += share * 64 * EPS * 37
        with outcome:
            verify_statistics(call, off)


def test_the_mass_of_large_scores_may_be_off_by_their_rounding():
    """Weights of rows with a log-sum-exp of 1,000 are off by its last place: layer 0 of Qwen2.5-Coder 0.5B has such."""
    call = make_call(dtype=torch.float32)
    call.queries, needs = call.queries * 300, frozenset({"columns", "log_sum_exp"})
    call.log_sum_exp = column_statistics(call, needs).log_sum_exp * (1 + EPS)
    assert float(call.log_sum_exp.max()) > 1000
    statistics = column_statistics(call, needs, method="fused")
    assert float((statistics.column_sum.sum(-1) - 37).abs().max()) > 64 * EPS * 37
    verify_statistics(call, statistics)
    statistics.column_sum = statistics.column_sum + 0.02 * torch.eye(37)[7]
    with pytest.raises(MeasurementError, match="mass on keys and null mass"):
        verify_statistics(call, statistics)


def test_mass_on_padding_is_refused():
    counted = torch.ones(2, 37, dtype=torch.bool)
    counted[1, :13] = False
    call = make_call(counted=counted, visible=Causal(0) & Keys(counted), dtype=torch.float32)
    call.key_positions, call.key_documents = (held.where(counted, -1) for held in (call.key_positions, call.key_documents))
    statistics = column_statistics(call)
    verify_statistics(call, statistics)
    statistics.column_sum = statistics.column_sum.clone()
    statistics.column_sum[1, 0, 3] = -1e-3
    with pytest.raises(MeasurementError, match=r"padding received attention \(0\.001\); its mask was misread"):
        verify_statistics(call, statistics)


def test_null_mass_counts_and_its_absence_proves_nothing():
    call = make_call(dtype=torch.float32, sink_scores=torch.ones(1, 4, 1))
    statistics = column_statistics(call, frozenset({"columns", "mass"}))
    assert statistics.null_mass is not None
    assert statistics.null_mass.min() > 0
    verify_statistics(call, statistics)
    unknown = dataclasses.replace(statistics, null_mass=None)
    verify_statistics(call, unknown)
    with pytest.raises(MeasurementError, match="mass on keys and null mass"):
        verify_statistics(dataclasses.replace(call, sink_scores=None), unknown)
    sigmoid = make_call(dtype=torch.float32, operation={"name": "sigmoid"})
    verify_statistics(sigmoid, column_statistics(sigmoid))  # rows that need not sum to one


@pytest.mark.parametrize("gain", [0.5, 1.0, 4.0])
def test_an_error_is_given_in_units_of_what_is_allowed(gain):
    """Half of the bound of the docstring, written out for the one row of a call, is reported as one half."""
    call = make_call(batch=1, heads=1, kv_heads=1, q_len=1, kv_len=50, dtype=torch.float32, gain=torch.tensor(gain))
    scores, values = call.scores(0, 1)[0, 0, 0], call.values[0, 0].abs()
    weights, factor = scores.softmax(0), max(1.0, gain)
    allowed = EPS * (32 + 4 * scores.abs().max()) * values.max() * factor + 2 * EPS * 50 * (weights @ values) * factor
    exact = dataclasses.replace(call, **{name: getattr(call, name).double() for name in ("queries", "keys", "values")})
    outputs = exact.outputs(0, 1)
    outputs[0, 0, 0] += allowed / 2
    rows, largest = verify_call(answered(call, outputs))
    assert rows == 1
    assert largest == pytest.approx(0.5, abs=0.05)
