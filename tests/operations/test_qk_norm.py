"""QK-norm: a 3-4-5 angle by hand, independence of lengths, and of which side of the rotary embedding it is on."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from sinklab.attention.operation import HeadShape
from sinklab.errors import ConfigurationError
from sinklab.models.attach import attach
from sinklab.operations.qk_norm import QkNorm
from sinklab.registry import operations
from sinklab.testing import check_operation

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, hidden_size=16)


def test_contract():
    check_operation(QkNorm(unit_length=True, initial=16.0))


def scores(operation: QkNorm, queries: torch.Tensor, keys: torch.Tensor, gain: list[float]) -> torch.Tensor:
    state = {"gain": torch.tensor(gain, dtype=queries.dtype)}
    queries, keys = operation.features(queries, keys, state)
    return queries @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5


def test_three_tokens_by_hand():
    query = torch.tensor([[3.0, 4.0]], dtype=torch.float64)[None, None]
    keys = torch.tensor([[3.0, 4.0], [8.0, 6.0], [-4.0, 3.0]], dtype=torch.float64)[None, None]
    cosines = torch.tensor([1.0, 24 / 25, 0.0], dtype=torch.float64)
    got = scores(QkNorm(unit_length=True), query, keys, [5.0]).flatten()
    torch.testing.assert_close(
        got, 5.0 * cosines, rtol=0, atol=1e-5
    )  # 1e-6 under the root, beside mean squares of 12.5 and more
    got = scores(QkNorm(), query, keys, [5.0]).flatten()
    torch.testing.assert_close(got, 5.0 * math.sqrt(2.0) * cosines, rtol=0, atol=1e-5)


def test_lengths_do_not_matter_and_the_gain_belongs_to_the_query_head():
    torch.manual_seed(0)
    queries, keys = torch.randn(1, 4, 5, 8, dtype=torch.float64), torch.randn(1, 4, 5, 8, dtype=torch.float64)
    usual = scores(QkNorm(), queries, keys, [1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(scores(QkNorm(), 7.0 * queries, 0.2 * keys, [1.0, 2.0, 3.0, 4.0]), usual, rtol=0, atol=1e-3)
    plain = scores(QkNorm(), queries, keys, [1.0] * 4)
    torch.testing.assert_close(usual, plain * torch.arange(1.0, 5.0, dtype=torch.float64)[:, None, None], rtol=1e-12, atol=0)
    assert float(plain.abs().max()) <= math.sqrt(8.0)


def test_rotations_may_come_before_or_after():
    queries, keys = torch.randn(1, 4, 5, 8, dtype=torch.float64), torch.randn(1, 2, 5, 8, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    state = {"gain": torch.rand(4, dtype=torch.float64)}
    before = [states @ rotation for states in QkNorm().features(queries, keys, state)]
    after = QkNorm().features(queries @ rotation, keys @ rotation, state)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_initial_gain():
    assert QkNorm(initial=16.0).parameters(SHAPE)["gain"].tolist() == [16.0] * 4
    for initial in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigurationError, match=f"operation 'qk_norm': initial = {initial} must be a positive gain"):
            QkNorm(initial=initial)


def test_round_trip():
    operation = QkNorm(unit_length=True, initial=16.0)
    assert operations.make(operation.to_dict()) == operation


def test_unit_length_is_refused_where_the_model_scales_in_its_own_way():
    """T5 does not scale: `gain` would not be all that stands before the cosine."""
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ConfigurationError, match=r"the model scales scores by 1 and not by 1/sqrt\(8\)"):
        attach(transformers.T5ForConditionalGeneration(config), {"name": "qk_norm", "unit_length": True})
    attach(transformers.T5ForConditionalGeneration(config), "qk_norm")
