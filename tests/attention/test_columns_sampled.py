"""Weights on known keys, and column means from a sample of queries."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from column_calls import cases, dense_oracle, dense_visible, make_call

from sinklab.attention.columns import column_statistics, estimate_columns, known_key_weights
from sinklab.attention.visibility import Causal, Dense, Keys
from sinklab.errors import ConfigurationError

CASES = {name: case for name, case in cases().items() if case[0].operation.name == "softmax"}


def _weights(call, visible):
    """Whole weights from the oracle: a bucket per query is a row of weights."""
    return dense_oracle(call, visible, call.q_len)["buckets"]


@pytest.mark.parametrize("name", CASES)
def test_known_keys_equal_whole_matrices(name: str) -> None:
    call, visible = CASES[name]
    log_sum_exp = column_statistics(call, frozenset({"log_sum_exp"}), method="blocked").log_sum_exp
    keys = torch.tensor([0, 5, call.kv_len - 1, 0])
    got = known_key_weights(call, log_sum_exp, keys)
    expected = _weights(call, visible)[..., keys]
    # A query that is hidden from every key has log-sum-exp minus infinity: its weights are 0, not NaN.
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)
    assert not got[(~visible[..., keys]).expand_as(got)].any()


@pytest.mark.parametrize("name", ["causal", "left padding", "mask per sample and head", "position bias", "grouped queries"])
def test_other_keys_in_every_sample(name: str) -> None:
    call, visible = CASES[name]
    log_sum_exp = column_statistics(call, frozenset({"log_sum_exp"}), method="blocked").log_sum_exp
    keys = torch.tensor([[0, 9], [12, 3]])
    expected = torch.stack([_weights(call, visible)[sample][..., keys[sample]] for sample in range(2)])
    torch.testing.assert_close(known_key_weights(call, log_sum_exp, keys), expected, atol=1e-11, rtol=1e-11)


def test_columns_add_up() -> None:
    call, _ = CASES["causal"]
    statistics = column_statistics(call, frozenset({"columns", "log_sum_exp"}))
    weights = known_key_weights(call, statistics.log_sum_exp, torch.arange(call.kv_len))
    torch.testing.assert_close(weights.sum(2), statistics.column_sum, atol=1e-11, rtol=0)


def test_known_keys_refuse() -> None:
    call = CASES["causal"][0]
    lse = torch.zeros(call.queries.shape[:3])
    with pytest.raises(ConfigurationError, match="key index -1 to 37 outside the 37 keys"):
        known_key_weights(call, lse, torch.tensor([-1, 37]))
    with pytest.raises(ConfigurationError, match="key_index is empty"):
        known_key_weights(call, lse, torch.tensor([], dtype=torch.long))
    with pytest.raises(ConfigurationError, match="need a softmax, the operation is 'sigmoid'"):
        known_key_weights(make_call(operation={"name": "sigmoid"}), lse, torch.tensor([0]))


def _mean(call, visible):
    oracle = dense_oracle(call, visible, 1)
    return oracle["column_sum"] / oracle["column_count"].clamp(min=1)


def test_every_query_is_the_exact_mean() -> None:
    for name in ("causal", "left padding", "sink logit per query", "position bias", "mask per sample and head"):
        call, visible = CASES[name]
        mean, _ = estimate_columns(call, call.q_len, seed=0)
        torch.testing.assert_close(mean, _mean(call, visible), atol=1e-11, rtol=0)


@pytest.mark.parametrize("local", [False, True], ids=["spread", "local"])
def test_the_interval_covers(local: bool) -> None:
    """Also for heads that look at their neighbours, whose columns are a few spikes that a sample may miss."""
    length = 1200
    call = make_call(batch=1, heads=2, kv_heads=2, q_len=length, head_dim=16, dtype=torch.float32, spread=2.0)
    if local:
        positions = torch.arange(length, dtype=torch.float32)
        call = dataclasses.replace(call, bias=-(positions[:, None] - positions).abs()[None, None])
    visible = dense_visible(call, "causal")
    exact = _mean(call, visible)
    covered = []
    for seed in range(2):
        mean, half_width = estimate_columns(call, 200, seed)
        covered.append(((mean - exact).abs() <= half_width + 1e-6).double().mean())
    assert min(covered) >= 0.93
    assert half_width[..., 0].max() < 0.1  # and it says something: sinks have means of 0.3 and more


def test_a_key_that_no_drawn_query_sees_is_unknown() -> None:
    call = make_call(batch=1, heads=1, kv_heads=1, q_len=50, visible=Causal())
    mean, half_width = estimate_columns(call, 5, seed=0)
    assert mean[0, 0, -1] == 0
    assert half_width[0, 0, -1] == 1


def test_the_draw_is_the_seed() -> None:
    call = make_call(visible=Dense(torch.ones(37, 37, dtype=torch.bool).tril()[None, None]) & Keys(torch.ones(2, 37) > 0))
    one, again, other = (estimate_columns(call, 9, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    with pytest.raises(ConfigurationError, match="between 1 and the 37 queries of the call, got 38"):
        estimate_columns(call, 38, 0)
