"""Column statistics: the blocked and the fused way against whole matrices, in every situation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from column_calls import ALL, FIELDS, cases, dense_oracle, make_call, with_log_sum_exp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.statistics.blocked import blocked_statistics
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.statistics.fused import LargeScoresError, fused_statistics
from sinklab.attention.visibility import Causal, Dense, Window
from sinklab.errors import ConfigurationError

CASES = cases()
SOFTMAX = [n for n, (c, _) in CASES.items() if c.operation.name == "softmax" and c.softcap is None and c.bias is None]

# In float64 the two ways differ from the oracle by rounding only: 2**-53 times sums of at most 37 terms of at most 37. Under
# scores of a few hundred the exponent's own rounding, 2**-53 · 1000, comes on top.
EXACT = 1e-11


def assert_fields(got: Statistics, expected: dict, bound: float, names=FIELDS) -> None:
    for name in names:
        value, reference = getattr(got, name), expected[name]
        assert (value is None) == (reference is None), name
        if reference is not None:
            torch.testing.assert_close(
                value.double().expand_as(reference), reference, atol=bound, rtol=bound, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("name", CASES)
def test_blocked_equals_whole_matrices(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call, visible = CASES[name]
    monkeypatch.setattr("sinklab.attention.call.SCORES_AT_ONCE", rows * call.queries.shape[0] * call.num_heads * call.kv_len)
    assert_fields(blocked_statistics(call, ALL), dense_oracle(call, visible), EXACT)


@pytest.mark.parametrize("known", [True, False], ids=["LSE given", "LSE computed"])
@pytest.mark.parametrize("tile", [(3, 7), (16, 64), (512, 1024)], ids=str)
@pytest.mark.parametrize("name", SOFTMAX)
def test_fused_equals_whole_matrices(name: str, tile: tuple[int, int], known: bool) -> None:
    call, visible = CASES[name]
    call = with_log_sum_exp(call, visible) if known else call
    assert_fields(fused_statistics(call, ALL, *tile), dense_oracle(call, visible), EXACT)


@pytest.mark.parametrize("method", ["blocked", "fused"])
def test_padding_rows_do_not_count_whatever_visibility_says(method: str) -> None:
    """Right padding by position alone: the mask stays causal, the last queries of one sample are no tokens."""
    counted = torch.ones(2, 37, dtype=torch.bool)
    counted[1, -9:] = False
    call = make_call(counted=counted)
    visible = torch.ones(37, 37, dtype=torch.bool).tril().expand(2, 4, -1, -1)
    got = column_statistics(with_log_sum_exp(call, visible), method=method)
    assert_fields(got, dense_oracle(call, visible), EXACT, ["column_sum", "column_count"])
    assert got.column_sum[1].sum() == pytest.approx(4 * 28)
    assert not got.column_sum[1, :, -9:].any()


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("method", ["blocked", "fused"])
def test_padding_may_hold_anything(method: str, sink: bool) -> None:
    call, visible = CASES["left padding"]
    if sink:
        call = dataclasses.replace(call, sink_scores=torch.ones(1, 4, 1, dtype=torch.float64))
    queries, keys = call.queries.clone(), call.keys.clone()
    queries[1, :, :9] = torch.nan
    keys[1, :, :9] = torch.nan
    poisoned = dataclasses.replace(with_log_sum_exp(call, visible), queries=queries, keys=keys)
    poisoned.log_sum_exp[1, :, :9] = torch.nan
    assert_fields(column_statistics(poisoned, ALL, method=method), dense_oracle(call, visible), EXACT)


def test_nan_in_a_token_is_not_hidden() -> None:
    call, visible = CASES["causal"]
    keys = call.keys.clone()
    keys[0, 0, 3] = torch.nan
    for method in ("blocked", "fused"):
        got = column_statistics(dataclasses.replace(with_log_sum_exp(call, visible), keys=keys), method=method)
        assert got.column_sum[0, 0].isnan().any(), method


@pytest.mark.parametrize(("spread", "least"), [(1e6, 4096.0), (1e10, 1e8)])
def test_scores_of_any_size_give_shares(spread: float, least: float) -> None:
    """In float32 a score of 1e8 is a multiple of 8: its difference to a log-sum-exp of that size may come out as 8."""
    call = make_call(q_len=200, dtype=torch.float32, spread=spread)
    found = column_statistics(call, ALL)
    assert float(found.log_sum_exp.abs().max()) > least
    ones = torch.ones_like(found.row_mass)
    torch.testing.assert_close(found.row_mass, ones, rtol=0.0, atol=200 * 2**-24)
    assert float(found.row_max.max()) <= 1.0 + 2**-23
    torch.testing.assert_close(found.column_sum, blocked_statistics(call, ALL).column_sum, rtol=0.0, atol=0.0)
    with pytest.raises(LargeScoresError, match=r"layers\.0\.attention: a log-sum-exp of size .* too few digits .* float32"):
        column_statistics(call, ALL, method="fused")


def test_float64_has_digits_left_where_float32_has_not() -> None:
    call = make_call(q_len=200, spread=1e6)
    fused, blocked = (column_statistics(call, ALL, method=method) for method in ("fused", "blocked"))
    # A score of about 1e7 is rounded by 1e7 · 2⁻⁵³ a few times, and that is the relative error of a weight.
    torch.testing.assert_close(fused.column_sum, blocked.column_sum, rtol=0.0, atol=200 * 16 * 1e7 * 2**-53)


@pytest.mark.parametrize("method", ["blocked", "fused"])
def test_mass_is_the_number_of_counted_queries(method: str) -> None:
    call = with_log_sum_exp(*_long_call(torch.float32, 700))
    total = column_statistics(call, method=method).column_sum.sum(dim=2)
    # Every weight carries a relative error of at most (1 + |score| + |LSE|) · 2**-23 with |score|, |LSE| < 12 here.
    assert total.numpy() == pytest.approx(700, rel=25 * 2**-23)


def test_a_sink_logit_by_hand() -> None:
    """Two equal scores 0 and a sink logit ln 2: weights 1/4, 1/4, and 1/2 on nothing; one visible key: 1/3 and 2/3."""
    call = make_call(batch=1, heads=1, kv_heads=1, q_len=2, sink_scores=torch.full((1, 1, 1), 2.0).log().double())
    call = dataclasses.replace(call, queries=torch.zeros_like(call.queries))
    for method in ("blocked", "fused"):
        got = column_statistics(call, ALL, method=method)
        assert got.null_mass.flatten().tolist() == pytest.approx([2 / 3, 1 / 2])
        assert got.row_mass.flatten().tolist() == pytest.approx([1 / 3, 1 / 2])
        assert got.column_sum.flatten().tolist() == pytest.approx([1 / 3 + 1 / 4, 1 / 4])
        assert got.row_max.flatten().tolist() == pytest.approx([1 / 3, 1 / 4])
        assert got.row_entropy.flatten().tolist() == pytest.approx([0, torch.tensor(2.0).log().item()])
        assert got.log_sum_exp.flatten().tolist() == pytest.approx([0, torch.tensor(2.0).log().item()])
        assert got.column_share is got.column_sum


@pytest.mark.parametrize("method", ["blocked", "fused"])
def test_an_overwhelming_sink_logit_leaves_the_entropy(method: str) -> None:
    """The weights underflow to zero; their distribution over the keys is still that of the softmax."""
    call, visible = CASES["causal"]
    drowned = dataclasses.replace(call, sink_scores=torch.full((1, 4, 1), 2000.0, dtype=torch.float64))
    got = column_statistics(drowned, ALL, method=method)
    assert not got.column_sum.any()
    assert got.null_mass.min() == 1
    assert_fields(got, dense_oracle(call, visible), EXACT, ["row_entropy"])


def test_the_entropy_does_not_inherit_the_error_of_a_given_log_sum_exp() -> None:
    """With LSE off by 0.01 all weights shrink alike: the mass says so, and their distribution is what it was."""
    call, visible = CASES["causal"]
    call = with_log_sum_exp(call, visible)
    shifted = dataclasses.replace(call, log_sum_exp=call.log_sum_exp + 0.01)
    got = fused_statistics(shifted, ALL)
    assert_fields(got, dense_oracle(call, visible), EXACT, ["row_entropy"])
    torch.testing.assert_close(got.row_mass, torch.full_like(got.row_mass, -0.01).exp(), atol=EXACT, rtol=0)


@pytest.mark.parametrize("method", ["blocked", "fused"])
def test_repeated_tokens_share_their_weight_equally(method: str) -> None:
    """Without positions, query t gives each of its t + 1 equal keys 1 / (t + 1): column k sums to H(T) - H(k)."""
    call = make_call(q_len=40)
    call = dataclasses.replace(
        call, queries=call.queries[:, :, :1].expand(-1, -1, 40, -1), keys=call.keys[:, :, :1].expand(-1, -1, 40, -1)
    )
    visible = torch.ones(40, 40, dtype=torch.bool).tril().expand(2, 4, -1, -1)
    got = column_statistics(with_log_sum_exp(call, visible), method=method)
    weights = 1 / torch.arange(1, 41, dtype=torch.float64)
    assert torch.allclose(got.column_sum, weights.flip(0).cumsum(0).flip(0).expand_as(got.column_sum), rtol=1e-12)


def _long_call(dtype: torch.dtype, length: int = 1100, **options) -> tuple[AttentionCall, torch.Tensor]:
    call = make_call(batch=1, heads=2, kv_heads=1, q_len=length, head_dim=64, dtype=dtype, spread=2.0, **options)
    return call, torch.ones(length, length, dtype=torch.bool).tril().expand(1, 2, -1, -1)


def test_float32_at_length() -> None:
    call, visible = _long_call(torch.float32)
    expected = dense_oracle(call, visible)
    got = fused_statistics(with_log_sum_exp(call, visible), ALL)
    # |score| and |LSE| stay below 16 and each is rounded a few times: exponents are right to 16 · 4 · 2**-24 = 4e-6.
    relative = (got.column_sum.double() / expected["column_sum"] - 1).abs().max()
    assert relative < 1e-5
    assert_fields(got, expected, 5e-5, ["row_entropy", "row_mass", "row_max", "score_mean", "column_count"])


def test_bfloat16_inputs_are_worked_on_in_float32() -> None:
    call, visible = _long_call(torch.bfloat16)
    expected = dense_oracle(call, visible)  # of the same rounded inputs
    keys, values = (tensor.repeat_interleave(2, 1) for tensor in (call.keys, call.values))
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call.queries, keys, values, 0.0, True, scale=call.scaling
    )
    got = fused_statistics(dataclasses.replace(call, log_sum_exp=lse), ALL)
    # The kernel's own LSE is the only thing that has seen bfloat16; it is right to about 1e-4.
    assert (got.column_sum.double() / expected["column_sum"] - 1).abs().max() < 5e-4
    assert got.column_sum.dtype == torch.float32
    assert_fields(got, expected, 5e-4, ["row_entropy", "row_mass", "row_max"])
    own = fused_statistics(call, ALL)
    assert (own.column_sum.double() / expected["column_sum"] - 1).abs().max() < 1e-5


def test_autocast_changes_nothing() -> None:
    call, _ = _long_call(torch.float32)
    plain = column_statistics(call, ALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = column_statistics(call, ALL)
    for name in FIELDS:
        if getattr(plain, name) is not None:
            assert torch.equal(getattr(plain, name), getattr(inside, name)), name


def test_gradients_are_not_recorded() -> None:
    call, _ = _long_call(torch.float32)
    call = dataclasses.replace(call, queries=call.queries.requires_grad_())
    for method in ("blocked", "fused"):
        assert not column_statistics(call, method=method).column_sum.requires_grad


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("method", ["blocked", "fused"])
def test_no_tensor_of_the_size_of_the_matrix(method: str) -> None:
    length = 4500
    call = make_call(batch=1, heads=1, kv_heads=1, q_len=length, head_dim=8, dtype=torch.float32)
    call = dataclasses.replace(call, log_sum_exp=column_statistics(call, frozenset({"log_sum_exp"})).log_sum_exp)
    with _Largest() as largest:
        column_statistics(call, ALL, method=method)
    # 16 MiB of float32 is the largest block; the matrix would have 20 million entries.
    assert largest.numel <= 16 * 2**20 / 4
    with _Largest() as whole:
        call.scores(0, length)
    assert whole.numel == length**2


@settings(max_examples=25, deadline=None)
@given(
    q_len=st.integers(1, 30),
    cached=st.integers(0, 20),
    kv_heads=st.sampled_from([1, 2]),
    tile=st.tuples(st.integers(2, 30), st.integers(4, 50)),
)
def test_fused_equals_blocked_on_any_shape(q_len: int, cached: int, kv_heads: int, tile: tuple[int, int]) -> None:
    rule = Causal(cached) & Window(17, cached) if q_len % 2 else Causal(cached)
    call = make_call(
        batch=1, heads=2, kv_heads=kv_heads, q_len=q_len, kv_len=q_len + cached, visible=rule, seed=q_len, head_dim=4
    )
    one, other = blocked_statistics(call, ALL), fused_statistics(call, ALL, *tile)
    expected = {name: getattr(one, name) for name in FIELDS}
    expected["column_count"] = expected["column_count"].double()
    assert_fields(other, expected, EXACT)


def test_needs_decide_what_is_filled() -> None:
    call, visible = CASES["causal"]
    call = with_log_sum_exp(call, visible)
    fields = {
        "columns": {"column_sum", "column_share", "column_count"},
        "mass": {"row_mass", "null_mass"},
        "log_sum_exp": {"log_sum_exp"},
        "entropy": {"row_entropy"},
        "maximum": {"row_max"},
        "scores": {"score_mean"},
        "head_outputs": set(),
    }
    for method in ("blocked", "fused"):
        for need, names in fields.items():
            got = column_statistics(call, frozenset({need}), method=method)
            assert {name for name in FIELDS if getattr(got, name) is not None} == names, (method, need)


def test_count_keeps_independent_dimensions_small() -> None:
    for method in ("blocked", "fused"):
        assert column_statistics(CASES["causal"][0], method=method).column_count.shape == (1, 1, 37)
        assert column_statistics(CASES["left padding"][0], method=method).column_count.shape == (2, 1, 37)


@pytest.mark.parametrize(
    ("name", "method", "reason"),
    [
        ("sigmoid", "fused", "the operation is 'sigmoid'"),
        ("soft-cap", "fused", "soft-capped"),
        ("position bias", "fused", "carry a bias"),
        ("causal", "fastest", "no such method"),
    ],
)
def test_a_method_that_cannot_serve_is_refused(name: str, method: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"layers\.0\.attention: method '{method}' cannot be used: .*{reason}"):
        column_statistics(CASES[name][0], method=method)


def test_wrong_arguments_are_refused() -> None:
    call, visible = CASES["causal"]
    with pytest.raises(ConfigurationError, match=r"unknown needs: collumns; known: columns, mass"):
        column_statistics(call, frozenset({"collumns"}))
    call = with_log_sum_exp(call, visible)
    call.log_sum_exp = call.log_sum_exp.transpose(1, 2)
    with pytest.raises(ConfigurationError, match=r"log_sum_exp has shape \(2, 37, 4\), expected .* \(2, 4, 37\)"):
        column_statistics(call)


def test_auto_serves_every_case() -> None:
    for call, visible in CASES.values():
        assert_fields(column_statistics(call, ALL), dense_oracle(call, visible), EXACT)


def test_auto_serves_what_the_fast_way_cannot_at_length() -> None:
    packed = torch.arange(600)[:, None] // 100 == torch.arange(600) // 100
    options = {"softcap": 2.0, "operation": None}, {"softcap": None, "operation": {"name": "sigmoid"}}
    for option in options:
        call = make_call(batch=1, heads=2, kv_heads=2, q_len=600, visible=Causal() & Dense(packed[None, None]), **option)
        visible = (packed & torch.ones(600, 600, dtype=torch.bool).tril()).expand(1, 2, -1, -1)
        if option["softcap"] is None:
            assert call.operation.bias == 0
        assert_fields(column_statistics(call, ALL), dense_oracle(call, visible), EXACT)
