"""Sinks apart: chunks whose sinks are attended to beside the window give what their tokens give one by one."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, decoder, gap, one_by_one, read, text

from sinklab.attention.session import attend
from sinklab.streaming import host
from sinklab.streaming.cache import SinkCache

LENGTH = 60


@torch.no_grad()
@pytest.mark.parametrize("quantized", [None, "int8"])
def test_as_one_by_one(quantized, monkeypatch):
    model, tokens, seen = decoder("llama"), text(LENGTH), []
    original = host._with_sinks

    def noted(query, window, total, keys, values, scaling):
        seen.append((query.shape[2], keys.shape[2:4]))
        return original(query, window, total, keys, values, scaling)

    monkeypatch.setattr(host, "_with_sinks", noted)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=24, quantized=quantized)
    found = torch.cat([read(model, part, cache) for part in tokens.split([SINKS + 1, 30, LENGTH - SINKS - 31], dim=1)], dim=1)
    # The first piece has the sinks among its queries; the others are served, a call a layer, with no copy of a sink too many.
    layers = model.config.num_hidden_layers
    chunks = [24, 6, *([24] * ((LENGTH - SINKS - 31) // 24)), (LENGTH - SINKS - 31) % 24]
    chunks = [size for size in chunks if size > 1]
    assert seen == [(size, (size, SINKS)) for size in chunks for _ in range(layers)]
    if quantized is None:
        assert gap(found, one_by_one(model, tokens)) < TOLERANCE
    else:  # integers round by more than the order of sums: as with copies of the sinks
        other = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=24, quantized=quantized)
        other._apart = None
        pieces = tokens.split([SINKS + 1, 30, LENGTH - SINKS - 31], dim=1)
        assert gap(found, torch.cat([read(model, part, other) for part in pieces], dim=1)) < 0.1


@torch.no_grad()
def test_under_an_observer_sinks_are_copied():
    """Somebody who looks at the attention of a chunk sees its sinks."""
    model, tokens = decoder("llama"), text(LENGTH)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    with attend(model):
        found = read(model, tokens, cache)
    assert gap(found, one_by_one(model, tokens)) < TOLERANCE


def made(name, **fields):
    """A small model of a family that is in no zoo."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_key_value_heads=2, max_position_embeddings=64, head_dim=8, bos_token_id=1, eos_token_id=2, **fields
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "fits", "fields"),
    [
        ("Llama", True, {}),
        (
            "Afmoe",
            True,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": SINKS + WINDOW + 1},
        ),  # a named mask
        ("DiffLlama", False, {}),  # attends twice
        ("Doge", False, {}),  # has a mask of its own
        (
            "JetMoe",
            False,
            {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
        ),  # repeats keys in its own order
    ],
)
def test_models_whose_attention_is_given_something_else_have_copies(name, fits, fields):
    model = made(name, **fields)
    tokens, cache = text(LENGTH), SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=8)
    assert gap(read(model, tokens, cache), one_by_one(model, tokens)) < TOLERANCE
    assert host._fits[model] == fits
    assert cache.table.given is None
    wide = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=24)  # another cache of the model need not find out
    assert gap(read(model, tokens, wide), one_by_one(model, tokens)) < TOLERANCE
