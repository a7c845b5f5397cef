"""Key-query retrieval at a trigger: weights of one head that solve it."""

from __future__ import annotations

import math

import pytest
import torch

BOS, TRIGGER, CONTENT, FIRST_KEY = 0, 1, 2, 3
"""Coordinates that mark the three kinds of token, and the first of the keys; values stand behind the keys."""
LENGTH, KEYS, VALUES = 9, 8, 3
WIDTH = FIRST_KEY + KEYS + VALUES


def batch_of(size=200, seed=0, position=None):
    """Sequences, float64 ``(size, LENGTH, WIDTH)``, the value that is asked for at their triggers, and where these stand."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.full((size,), position or 0)
    if position is None:
        positions = torch.randint(2, LENGTH, (size,), generator=generator)
    rows, first_value, places = torch.arange(size), FIRST_KEY + KEYS, torch.arange(1, LENGTH)
    inputs = torch.zeros(size, LENGTH, WIDTH, dtype=torch.float64)
    inputs[:, 0, BOS] = inputs[:, 1:, CONTENT] = 1
    # Distinct keys: the order of random numbers, of which each place takes one, and the trigger none of its own.
    order = torch.rand(size, KEYS, generator=generator).argsort(dim=1)[:, : LENGTH - 2]
    which = (places - 1 - (places > positions[:, None]).long()).clamp(max=LENGTH - 3)
    inputs[:, 1:, FIRST_KEY:first_value] = torch.nn.functional.one_hot(order.gather(1, which), KEYS).double()
    inputs[:, 1:, first_value:] = 2 * torch.rand(size, LENGTH - 1, VALUES, generator=generator, dtype=torch.float64) - 1
    asked = 1 + (torch.rand(size, generator=generator) * (positions - 1)).long()  # before the trigger, and not BOS
    inputs[rows, positions] = 0
    inputs[rows, positions, TRIGGER] = 1
    inputs[rows, positions, FIRST_KEY:first_value] = inputs[rows, asked, FIRST_KEY:first_value]
    targets = torch.zeros_like(inputs)
    targets[rows, positions, first_value:] = inputs[rows, asked, first_value:]
    return inputs, targets, torch.arange(LENGTH) == positions[:, None]


def head(score, value, inputs, attention="softmax"):
    """Outputs ``Σ_k A_k M x_k`` and causal weights of scores ``xᵀ S x'``: of softmax, or ReLU not divided by anything."""
    scores = inputs @ score @ inputs.mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    if attention == "softmax":
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    else:
        weights = scores.relu().masked_fill(hidden, 0.0)
    return weights @ inputs @ value.mT, weights


def solution(error=None):
    """Scores and values: of ReLU, 1 for the trigger on the token that it asks for, else 0 or less; or of softmax.

    Softmax takes ``c`` times these scores, and ``c`` for content tokens on BOS, whose value is 0. A content token at ``i``
    has a weight of ``i / (e^c + i)`` or less off BOS, and the trigger at ``j`` is off by ``2 j / (e^c + j)`` or less: so
    ``e^c = (length - 1)(2/ε - 1)`` keeps every coordinate to ``ε``.
    """
    score, value = torch.zeros(2, WIDTH, WIDTH, dtype=torch.float64)
    key, own = torch.arange(FIRST_KEY, FIRST_KEY + KEYS), torch.arange(FIRST_KEY + KEYS, WIDTH)
    score[key, key], value[own, own] = 1, 1
    score[CONTENT, CONTENT] = score[TRIGGER, TRIGGER] = -1
    if error is not None:
        score[CONTENT, BOS] = 1
        score *= math.log((LENGTH - 1) * (2 / error - 1))
    return score, value


def test_relu_solves_it_without_an_error_and_without_a_sink():
    inputs, targets, triggers = batch_of()
    outputs, weights = head(*solution(), inputs, "relu")
    assert torch.equal(outputs, targets)
    assert not weights[..., 0].any()
    assert not weights[~triggers].any()


@pytest.mark.parametrize("error", [0.5, 1e-2, 1e-6])
def test_softmax_solves_it_to_any_error_and_has_its_sink(error):
    inputs, targets, triggers = batch_of()
    outputs, weights = head(*solution(error), inputs)
    assert float((outputs - targets).abs().max()) <= error
    assert float(weights[:, 1:, 0][~triggers[:, 1:]].min()) >= 1 - error
