"""A ring in int8: what comes back, what it costs in memory, and that a model hardly notices."""

from __future__ import annotations

import pytest
import torch
from tests.architectures.zoo import ZOO, build

from sinklab.errors import ConfigurationError
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.state import load_state, save_state

TOKENS = torch.randint(4, 40, (2, 48), generator=torch.Generator().manual_seed(0))
SIZES = {"num_sinks": 2, "window": 9}


def model_of(dtype: torch.dtype = torch.float32):
    return build(ZOO["llama"], "sdpa").to(dtype).eval()


@torch.no_grad()
def read(model, cache, tokens=TOKENS, mask=None):
    return model(tokens, attention_mask=mask, past_key_values=cache, use_cache=True).logits


@torch.no_grad()
def read_singly(model, cache, tokens=TOKENS):
    return torch.cat([read(model, cache, tokens[:, i : i + 1]) for i in range(tokens.shape[1])], dim=1)


def test_a_token_comes_back_within_half_a_step_of_its_scale():
    model = model_of()
    exact, rounded = SinkCache(model, **SIZES), SinkCache(model, **SIZES, quantized=True)
    read(model, exact)
    read(model, rounded)
    ring = slice(2, None)
    for one, two in zip(exact.layers[:1], rounded.layers[:1], strict=True):  # deeper layers read what was rounded above them
        for held, codes, scales in (
            (one.keys, two.key_codes, two.key_scales),
            (one.values, two.value_codes, two.value_scales),
        ):
            assert codes.dtype == torch.int8
            off = (codes * scales - held)[:, :, ring].abs()
            assert off.max() > 0
            # Half a step, and what float32 adds to products of numbers up to 127 steps.
            assert bool((off <= scales[:, :, ring] * (0.5 + 127 * 2**-22)).all())
            assert codes.abs().amax(dim=-1)[:, :, ring].eq(127).all()


def test_sinks_are_kept_as_they_are():
    model = model_of()
    exact, rounded = SinkCache(model, **SIZES), SinkCache(model, **SIZES, quantized=True)
    read(model, exact)
    read(model, rounded)
    torch.testing.assert_close(rounded.layers[0].masters, exact.layers[0].masters, rtol=0, atol=0)
    torch.testing.assert_close(rounded.layers[0].sinks, exact.layers[0].values[:, :, :2], rtol=0, atol=0)


@pytest.mark.parametrize("way", [read, read_singly])
def test_logits_hardly_move(way):
    model = model_of()
    exact = way(model, SinkCache(model, **SIZES, chunk=7))
    rounded = way(model, SinkCache(model, **SIZES, chunk=7, quantized=True))
    # One part in 254 of the largest coordinate for each key and value; scores of size 10 then move by some hundredths.
    off = (rounded - exact).std() / exact.std()
    assert 1e-5 < off < 0.1


def test_a_padded_batch_and_another_count_of_positions():
    model = model_of()
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    exact, rounded = (SinkCache(model, **SIZES, quantized=quantized, chunk=8, rebase_at=24) for quantized in (False, True))
    logits = [read(model, cache, TOKENS[:, :30], mask[:, :30]) for cache in (exact, rounded)]
    logits = [
        torch.cat((one, read_singly(model, cache, TOKENS[:, 30:])), dim=1)
        for one, cache in zip(logits, (exact, rounded), strict=True)
    ]
    assert rounded.table.rebases == exact.table.rebases > 0
    off = (logits[1] - logits[0])[mask.bool()].std() / logits[0][mask.bool()].std()
    assert off < 0.1


def test_it_takes_a_quarter_of_the_memory():
    model = build(ZOO["llama"], "sdpa").eval()
    exact, rounded = SinkCache(model, num_sinks=2, window=500), SinkCache(model, num_sinks=2, window=500, quantized=True)
    read(model, exact)
    read(model, rounded)
    # int8 and a float32 scale for heads of size 8: 12 bytes instead of 32; for heads of size 64 it would be 68 of 256.
    assert rounded.bytes_held() / exact.bytes_held() == pytest.approx(12 / 32, rel=0.02)


def test_a_saved_state_goes_on_with_the_same_bits(tmp_path):
    model = model_of()
    cache = SinkCache(model, **SIZES, quantized=True)
    read(model, cache, TOKENS[:, :30])
    save_state(cache, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors", model).cache
    assert again.quantized
    torch.testing.assert_close(read(model, again, TOKENS[:, 30:]), read(model, cache, TOKENS[:, 30:]), rtol=0, atol=0)


def test_rows_are_reordered():
    model = model_of()
    cache, straight = SinkCache(model, **SIZES, quantized=True), SinkCache(model, **SIZES, quantized=True)
    read(model, cache, TOKENS[:, :20])
    cache.reorder_cache(torch.tensor([1, 0]))
    read(model, straight, TOKENS.flip(0)[:, :20])
    more = TOKENS[:, 20:21]
    torch.testing.assert_close(read(model, cache, more), read(model, straight, more), rtol=1e-5, atol=1e-5)


def test_keys_in_the_order_of_the_text_are_not_rounded():
    with pytest.raises(ConfigurationError, match="quantized is for keys in slots; BloomForCausalLM needs them in the order"):
        SinkCache(build(ZOO["bloom"]), **SIZES, quantized=True)
