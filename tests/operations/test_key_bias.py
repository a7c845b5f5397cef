"""Key bias: one more key by hand and by concatenation, learnable coordinates, fixed values, and settings that cannot be."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.attention.operation import HeadShape
from sinklab.errors import ConfigurationError
from sinklab.operations.key_bias import KeyBias
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, hidden_size=16)


@pytest.mark.parametrize(
    "operation", [KeyBias(shared=True, learnable=4), KeyBias(value_norm=5.0), KeyBias(value_norm=1.0, value_ones=True)], ids=str
)
def test_contract(operation):
    check_operation(operation)


def test_three_tokens_by_hand():
    scores = torch.log(torch.tensor([[1.0, 1.0, 1.0], [3.0, 1.0, 1.0], [2.0, 1.0, 5.0]]))[None, None]
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    queries = torch.tensor([[1.0, 5.0], [2.0, 5.0], [0.0, 5.0]])[None, None]
    null = KeyBias().null_scores(queries, 0.5, {"key": torch.tensor([[2 * math.log(2.0), 0.0]])})
    # The bias key scores ln 2, ln 4 and 0: it adds 2, 4 and 1 to sums of 1, 4 and 8.
    torch.testing.assert_close(null[0, 0], torch.log(torch.tensor([2.0, 4.0, 1.0])), rtol=0, atol=1e-6)
    mass = KeyBias().null_mass(scores, lower, null)[0, 0]
    torch.testing.assert_close(mass, torch.tensor([2 / 3, 4 / 8, 1 / 9]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        KeyBias().weights(scores, lower, null)[0, 0, 2], torch.tensor([2 / 9, 1 / 9, 5 / 9]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("operation", "value"),
    [
        (KeyBias(), [0.0] * 8),
        (KeyBias(value_norm=5.0), [5.0, *[0.0] * 7]),
        (KeyBias(value_norm=20.0, value_ones=True), [20.0 / math.sqrt(8.0)] * 8),
        (KeyBias(shared=True, value_norm=2.0), [2.0, *[0.0] * 7]),
    ],
    ids=str,
)
def test_it_is_softmax_over_one_more_key(operation, value):
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    key = torch.randn(1 if operation.shared else 4, 8, dtype=torch.float64)
    outputs, weights = operation.head_outputs(queries, keys, values, None, 0.5, {"key": key})
    front = [torch.cat((key[None, :, None].expand(2, 4, 1, 8), keys), dim=2)]
    front.append(torch.cat((torch.tensor(value, dtype=torch.float64).expand(2, 4, 1, 8), values), dim=2))
    expected, full = Softmax().head_outputs(queries, *front, None, 0.5)
    # Rounding of the product with a value of norm 20.
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(weights, full[..., 1:], rtol=0, atol=1e-14)


def test_parameters():
    assert KeyBias().parameters(SHAPE)["key"].shape == (4, 8)
    assert KeyBias(shared=True).parameters(SHAPE)["key"].shape == (1, 8)
    wide = HeadShape(num_heads=50, num_kv_heads=50, head_dim=100, value_dim=100, hidden_size=100)
    torch.manual_seed(0)
    # 5000 numbers: their deviation is known to 1 %; four times that
    assert float(KeyBias().parameters(wide)["key"].std()) == pytest.approx(0.02, rel=0.04)


def test_coordinates_that_are_not_learned_stay_zero():
    operation = KeyBias(learnable=3)
    key = operation.parameters(SHAPE)["key"].requires_grad_()
    assert bool((key[:, :3] != 0).all())
    assert float(key.detach()[:, 3:].abs().max()) == 0.0
    optimizer = torch.optim.AdamW([key], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        operation.head_outputs(*torch.randn(3, 1, 4, 5, 8), None, 0.5, {"key": key})[0].square().sum().backward()
        optimizer.step()
    assert float(key.detach()[:, 3:].abs().max()) == 0.0
    assert float(key.detach()[:, :3].abs().min()) > 0.01


def test_scores_in_half_precision_are_not_rounded():
    queries, key = torch.randn(1, 4, 5, 8).bfloat16(), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = KeyBias().null_scores(queries, 0.5, {"key": key})
    assert scores.dtype == torch.float32
    exact = torch.einsum("bhqd,hd->bhq", queries.double(), key.double()) * 0.5
    # Eight products and sums of numbers up to a few units, each rounded to 6e-8 of its size.
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learnable": 0}, "learnable = 0 must be at least 1; a key of zeros is softmax_plus_one"),
        ({"value_norm": -1.0}, r"value_norm = -1\.0 must be a length, finite and not negative"),
        ({"value_norm": math.inf}, "value_norm = inf must be a length"),
        ({"value_ones": True}, "value_ones gives a direction to a value of length 0; set value_norm too"),
    ],
)
def test_settings_that_cannot_take_effect(settings, message):
    with pytest.raises(ConfigurationError, match=f"operation 'key_bias': {message}"):
        KeyBias(**settings)


def test_heads_that_it_does_not_fit():
    with pytest.raises(ConfigurationError, match="learnable = 9 exceeds the 8 numbers of a key"):
        KeyBias(learnable=9).parameters(SHAPE)
    latent = HeadShape(num_heads=4, num_kv_heads=4, head_dim=8, value_dim=6, hidden_size=16)
    assert KeyBias().parameters(latent)["key"].shape == (4, 8)
    with pytest.raises(ConfigurationError, match=r"values as long as keys; these heads have 6 and 8\. Use key_value_bias"):
        KeyBias(value_norm=1.0).parameters(latent)


def test_round_trip():
    operation = KeyBias(shared=True, learnable=2, value_norm=5.0, value_ones=True)
    assert operations.make(operation.to_dict()) == operation
