"""Logits of mit-han-lab/streaming-llm and attention_sinks, stored, are those of a sink cache, token by token and in chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.streaming.cache import SinkCache

STORED = Path(__file__).parent / "peers.safetensors"
"""Written by ``benchmarks/peers/reference.py``, which runs the two packages in environments of their own."""

SINKS, WINDOW = 4, 28
"""The peers attend to these and to the token at hand, as we do."""


def make_model() -> LlamaForCausalLM:
    """A Llama whose weights depend on nothing but their names; sharpened, or a wrong position would hardly show."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim == 2:
                factor = 8 if "q_proj" in name or "k_proj" in name else 3 if "v_proj" in name or "o_proj" in name else 1
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02 * factor)
    return model


@pytest.fixture(scope="module")
def stored():
    with safe_open(STORED, "pt") as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())} | {"about": json.loads(file.metadata()["about"])}


def test_what_is_stored(stored):
    assert stored["about"] == {
        "attention_sinks": "transformers 4.34.0",
        "streaming_llm": "transformers 4.33.0",
        "sinks": SINKS,
        "window": WINDOW,
    }
    assert torch.equal(stored["attention_sinks"], stored["streaming_llm"])  # one algorithm


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[1] * 160, [40] * 4, [160], [31, 1, 1, 2, 60, 65]], ids=["one", "forty", "all", "ragged"])
def test_logits_are_those_of_the_peers(stored, backend, lengths):
    model = make_model()
    model.set_attn_implementation(backend)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=50)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in stored["tokens"][None].split(lengths, dim=1)]
    # Float32 through two layers with scores of size 3: found 2e-6; another window or position is 1e-2 off.
    torch.testing.assert_close(torch.cat(parts, dim=1)[0], stored["streaming_llm"], atol=2e-5, rtol=0)


def test_it_would_notice_another_window_and_other_positions(stored):
    model = make_model()
    for settings in ({"window": WINDOW + 1}, {"window": WINDOW, "positions": "original"}, {"window": WINDOW, "num_sinks": 3}):
        cache = SinkCache(model, **{"num_sinks": SINKS, **settings})
        with torch.no_grad():
            logits = model(stored["tokens"][None], past_key_values=cache).logits[0]
        apart = (logits - stored["streaming_llm"]).abs().amax(dim=-1)
        assert apart[: SINKS + WINDOW].max() < 2e-5 or "num_sinks" in settings
        assert apart[-80:].mean() > 1e-3
