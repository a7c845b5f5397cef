"""Operations that map queries and keys: by hand, as recurrences, and what lengths and rotations do to them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.attention.column_calls import make_call

from sinklab.attention.operation import HeadShape
from sinklab.attention.statistics.columns import column_statistics
from sinklab.errors import ConfigurationError
from sinklab.models.attach import attach
from sinklab.operations.elu_kernel import EluKernel
from sinklab.operations.identity import Identity
from sinklab.operations.mlp_kernel import MlpKernel
from sinklab.operations.qk_norm import QkNorm

# --- identity ----------------------------------------------------------------------------------------------------------------
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
SIGNED = torch.tensor([[2.0, 9.0, 9.0], [0.25, -0.5, 9.0], [3.0, -5.0, 1.0]])
# Row sums are 2, -0.25 and -1: divided by 2, by 1 because that is larger, and by |-1|.
DIVIDED = torch.tensor([[1.0, 0.0, 0.0], [0.25, -0.5, 0.0], [3.0, -5.0, 1.0]])


def test_three_tokens_by_hand():
    scores = SIGNED[None, None]
    assert torch.equal(Identity().weights(scores, CAUSAL)[0, 0], SIGNED.tril())
    assert torch.equal(Identity(normalize=True).weights(scores, CAUSAL)[0, 0], DIVIDED)
    assert torch.equal(Identity(normalize=True).weights(2 * scores, CAUSAL)[0, 0, 2], DIVIDED[2])  # by |-2|
    assert Identity().null_mass(scores, CAUSAL) is None


def test_outputs_are_linear_in_the_queries():
    queries, keys, values = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    once, _ = Identity().head_outputs(queries, keys, values, None, 0.5)
    thrice, _ = Identity().head_outputs(3 * queries, keys, values, None, 0.5)
    torch.testing.assert_close(thrice, 3 * once, atol=1e-12, rtol=0)
    torch.testing.assert_close(once, 0.5 * queries @ (keys.mT @ values), atol=1e-12, rtol=0)


def test_which_rows_sum_to_one():
    for operation in (kernel(normalize=normalize) for kernel in (Identity, MlpKernel) for normalize in (False, True)):
        assert operation.signed
        assert not operation.normalized
    assert EluKernel().normalized
    assert not EluKernel(normalize=False).normalized
    assert not EluKernel().signed


def test_share_of_a_key_takes_absolute_values():
    """Gu et al.'s proxy for signed weights, |w| / sum of |w|, on rows of two keys."""
    queries, keys = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1), torch.tensor([2.0, -6.0]).view(1, 1, 2, 1)
    made = make_call(batch=1, heads=1, kv_heads=1, q_len=2, operation={"name": "identity"})
    call = dataclasses.replace(made, queries=queries, keys=keys, values=keys, scaling=1.0)
    statistics = column_statistics(call)
    # Scores 2; 6, -18: shares 1; 1/4, 3/4.
    torch.testing.assert_close(statistics.column_share.flatten(), torch.tensor([1.25, 0.75]))


# --- elu_kernel --------------------------------------------------------------------------------------------------------------
# elu(x) + 1 of these is 1, 2 and 1/2.
NUMBERS = torch.tensor([0.0, 1.0, -math.log(2.0)], dtype=torch.float64).view(1, 1, 3, 1)
ELU_VALUES = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).view(1, 1, 3, 1)


@pytest.mark.parametrize(
    ("normalize", "weights", "outputs"),
    [
        (True, [[1, 0, 0], [1 / 3, 2 / 3, 0], [2 / 7, 4 / 7, 1 / 7]], [1, 7, 142 / 7]),
        (False, [[0.5, 0, 0], [1, 2, 0], [0.25, 0.5, 0.125]], [0.5, 21, 17.75]),
    ],
)
def test_three_tokens_by_hand_of_elu_kernel(normalize, weights, outputs):
    found, matrix = EluKernel(normalize=normalize).head_outputs(NUMBERS, NUMBERS, ELU_VALUES, CAUSAL, 0.5)
    torch.testing.assert_close(matrix[0, 0], torch.tensor(weights, dtype=torch.float64), atol=1e-15, rtol=0)
    torch.testing.assert_close(found.flatten(), torch.tensor(outputs, dtype=torch.float64), atol=1e-13, rtol=0)


@pytest.mark.parametrize("normalize", [False, True])
def test_is_a_recurrence_with_a_state(normalize):
    """Katharopoulos et al. 2020, eq. 16–20: a state of keys times values, and one of keys."""
    queries, keys, values = torch.randn(3, 1, 1, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state, total, expected = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), []
    for query, key, value in zip(F.elu(queries[0, 0]) + 1, F.elu(keys[0, 0]) + 1, values[0, 0], strict=True):
        state, total = state + torch.outer(key, value), total + key
        expected.append(query @ state / (query @ total) if normalize else 0.3 * query @ state)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    found, _ = EluKernel(normalize=normalize).head_outputs(queries, keys, values, visible, 0.3)
    torch.testing.assert_close(found[0, 0], torch.stack(expected), atol=1e-13, rtol=0)


def test_features_are_positive_and_keep_their_digits():
    numbers = torch.tensor([-20.0, -1.0, 0.0, 3.0]).requires_grad_()
    mapped, _ = EluKernel().features(numbers, numbers, {})
    torch.testing.assert_close(mapped, torch.tensor([math.exp(-20.0), math.exp(-1.0), 1.0, 4.0]), rtol=1e-6, atol=0)
    assert float(F.elu(numbers[0].detach()) + 1) == 0.0  # what the formula as written makes of the first in float32
    (slope,) = torch.autograd.grad(mapped.sum(), numbers)
    torch.testing.assert_close(slope, torch.tensor([math.exp(-20.0), math.exp(-1.0), 1.0, 1.0]), rtol=1e-6, atol=0)


def test_rows_sum_to_one_or_see_nothing():
    visible = torch.tensor([[True, False, False], [False, False, False], [True, False, True]])
    weights = EluKernel().weights(torch.rand(1, 2, 3, 3, generator=torch.Generator().manual_seed(0)), visible)
    torch.testing.assert_close(weights.sum(-1), torch.tensor([[[1.0, 0.0, 1.0]] * 2]))
    assert EluKernel().null_mass(torch.rand(1, 2, 3, 3), visible) is None


# --- mlp_kernel --------------------------------------------------------------------------------------------------------------
MLP_SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, hidden_size=256)


def test_three_tokens_by_hand_of_mlp_kernel():
    # first = [[1], [-1]] keeps both signs apart; second = [[2, 3]] adds 2·relu(x) and 3·relu(-x): 1 -> 2, -1 -> 3, 2 -> 4.
    state = {"first": torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), "second": torch.tensor([[2.0, 3.0], [0.0, 0.0]])}
    numbers = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0]])[None, None]
    _, weights = MlpKernel().head_outputs(numbers, numbers, numbers, CAUSAL, 0.5, state)
    assert torch.equal(weights[0, 0], torch.tensor([[2.0, 0.0, 0.0], [3.0, 4.5, 0.0], [4.0, 6.0, 8.0]]))
    _, weights = MlpKernel(normalize=True).head_outputs(numbers, numbers, numbers, CAUSAL, 0.5, state)
    torch.testing.assert_close(weights[0, 0, 2], torch.tensor([4.0, 6.0, 8.0]) / 18)


def test_one_network_a_layer():
    torch.manual_seed(0)
    parameters = MlpKernel().parameters(MLP_SHAPE)
    assert {name: tuple(value.shape) for name, value in parameters.items()} == {"first": (64, 64), "second": (64, 64)}
    # 4096 normal numbers: their deviation is known to one part in 90, 1 / sqrt(2 · 4096); four times that is allowed.
    for value in parameters.values():
        assert abs(float(value.std()) / (0.4 / 64) ** 0.5 - 1) <= 4 / 90


def test_is_the_identity_kernel_of_the_mapped_states():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64)
    state = {"first": torch.randn(4, 4, dtype=torch.float64), "second": torch.randn(4, 4, dtype=torch.float64)}
    mapped = [torch.relu(states @ state["first"].T) @ state["second"].T for states in (queries, keys)]
    for normalize in (False, True):
        found, _ = MlpKernel(normalize=normalize).head_outputs(queries, keys, values, CAUSAL, 0.5, state)
        expected, _ = Identity(normalize=normalize).head_outputs(*mapped, values, CAUSAL, 0.5)
        torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)


# --- qk_norm -----------------------------------------------------------------------------------------------------------------
SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, hidden_size=16)


def scores(operation: QkNorm, queries: torch.Tensor, keys: torch.Tensor, gain: list[float]) -> torch.Tensor:
    state = {"gain": torch.tensor(gain, dtype=queries.dtype)}
    queries, keys = operation.features(queries, keys, state)
    return queries @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5


def test_three_tokens_by_hand_of_qk_norm():
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


def test_unit_length_is_refused_where_the_model_scales_in_its_own_way():
    """T5 does not scale: `gain` would not be all that stands before the cosine."""
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ConfigurationError, match=r"the model scales scores by 1 and not by 1/sqrt\(8\)"):
        attach(transformers.T5ForConditionalGeneration(config), {"name": "qk_norm", "unit_length": True})
    attach(transformers.T5ForConditionalGeneration(config), "qk_norm")
