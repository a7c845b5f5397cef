"""The course of a training: onsets by hand, models that are kept, and gradients on models that are planted with a sink."""

from __future__ import annotations

import pytest
import torch
from tests.claims.planted_models import by_position, drawn_rows
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from sinklab.errors import DoesNotApply
from sinklab.models.language_model import SinkLM
from sinklab.training.rows import token_losses
from sinklab_claims.chen2026 import gradient_numbers, half_way


def test_half_way_by_hand():
    assert half_way({10: 0.0, 20: 0.2, 40: 0.6, 80: 1.0}, 0.1) == 35.0  # 0.5 lies three quarters of the way from 20 to 40
    assert half_way({10: 3.0, 20: 1.0, 40: 1.0}, 0.1) == 15.0  # a curve may fall
    assert half_way({10: 0.0, 20: 5.0, 40: 1.0}, 0.1) == 11.0  # and overshoot
    assert half_way({10: 1.0, 20: 9.0, 40: 1.05}, 0.1) is None
    # A jump in warm-up is no onset: it comes back, and 0.5 lies half of the way from 0.25 to 0.75.
    assert half_way({10: 0.0, 20: 5.0, 40: 0.25, 80: 0.75, 160: 1.0}, 0.1) == 60.0


def with_values(strength: float) -> SinkLM:
    """A planted sink on position 0, and random values that the loss depends on."""
    model = by_position(strength)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.embed_tokens.weight[:, 2:] = torch.randn(40, 14, generator=generator)
        for name in ("v_proj", "o_proj"):
            weight = getattr(model.layers[0].self_attn, name).weight
            weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return model


def test_gradients_of_keys_are_those_of_differences():
    model, rows, front = with_values(0.2).double(), drawn_rows(2)[:, :6], 0
    attention, step = model.layers[0].self_attn, 1e-4

    def loss(token: int, coordinate: int, by: float) -> torch.Tensor:
        def moved(module, args, output):
            output = output.clone()
            output[:, token, coordinate] += by
            return output

        handle = attention.k_proj.register_forward_hook(moved)
        with torch.no_grad():
            found = token_losses(model, rows).double().sum(1)  # of each row, which no other row's keys change
        handle.remove()
        return found

    slopes = torch.stack(
        [torch.stack([(loss(token, at, step) - loss(token, at, -step)) / (2 * step) for at in range(16)]) for token in range(6)]
    )  # (tokens, coordinates, rows)
    norms = slopes.unflatten(1, (2, 8)).norm(dim=2).mean(2).sum(1)
    expected = (norms[0] / norms[1:].mean()).item()
    # Losses are float32 in the end: differences of 1e-7 over 2e-4, of slopes of order 0.1.
    assert gradient_numbers(model, rows, front)["key_gradient"] == pytest.approx(expected, rel=0.02)


def test_gradients_gather_with_the_attention_and_not_beyond_it():
    rows = drawn_rows()
    even, sinking = (gradient_numbers(with_values(strength), rows, 0) for strength in (0.0, 6.0))
    # Of an even head the first of 64 keys receives 5 times the attention of the others, because more queries see it.
    assert sinking["key_gradient"] > 5 * even["key_gradient"] > 5 * 2
    assert all(0.5 < found["key_gradient_per_mass"] < 1 for found in (even, sinking))
    assert even.keys() == {"key_gradient", "key_gradient_per_mass"}  # with one layer no hidden state lies between two


def test_a_map_for_queries_keys_and_values_together_has_no_gradient_of_keys():
    config = GPTNeoXConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    with pytest.raises(DoesNotApply, match="no map for keys alone"):
        gradient_numbers(GPTNeoXForCausalLM(config).eval(), drawn_rows(), 0)
