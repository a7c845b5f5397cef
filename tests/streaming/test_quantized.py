"""A ring in eight or four bits: what comes back, which tokens stay whole, what it costs, and that a model hardly notices."""

import pytest
import torch
from tests.architectures.zoo import ZOO, build
from tests.streaming.decoders import one_by_one, read

from sinklab.errors import ConfigurationError
from sinklab.models.float_grids import FORMATS
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.quantized import GROUP
from sinklab.streaming.state import load_state, save_state

TOKENS = torch.randint(4, 40, (2, 96), generator=torch.Generator().manual_seed(0))
SIZES = {"num_sinks": 2, "window": 31, "chunk": 16}
"""A ring of 32 slots in four groups of 8. Of a chunk longer than the ring, the last group holds tokens of two laps, whole."""
INTEGERS = ("int8", "int4")
FLOATS = ("fp8", "fp8b", "mxfp4", "nvfp4")
KINDS = (*INTEGERS, *FLOATS)


def model_of(dtype: torch.dtype = torch.float32):
    return build(ZOO["llama"], "sdpa").to(dtype).eval()


def held(layer):
    """Keys and values as the next step sees them, ``(batch, heads, slots, size)``."""
    layer._widen()
    keys, values = layer.keys.clone(), layer.values.clone()
    layer._drop()
    return keys, values


def steps_of(layer, values, side):
    """Half a step of the grid of each number of the ring: of a channel of a group of keys, of a token of values."""
    groups = values.unflatten(2, (-1, layer.group))
    axis = 3 if side == "key" else 4
    low, high = groups.amin(dim=axis, keepdim=True).clamp(max=0), groups.amax(dim=axis, keepdim=True).clamp(min=0)
    return (((high - low) / (2**layer.kind.bits - 1)) / 2).expand_as(groups).flatten(2, 3)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("way", [read, one_by_one])
def test_a_token_comes_back_within_half_a_step_of_its_grid_and_the_newest_as_they_are(way, kind):
    model = model_of()
    # 2 sinks and 86 tokens: groups 0 and 1 of the ring are full for the third time, and 6 tokens of group 2 wait.
    exact, rounded = SinkCache(model, **SIZES), SinkCache(model, **SIZES, quantized=kind)
    way(model, TOKENS[:, :88], exact)
    way(model, TOKENS[:, :88], rounded)
    one, two = exact.layers[0], rounded.layers[0]  # deeper layers read what was rounded above them
    assert torch.equal(one.masters, two.masters)
    assert torch.equal(one.values[:, :, :2], two.sinks)
    assert (two.ring, two.group) == (32, 8)
    assert two.waiting.flatten(1).nonzero()[:, 1].tolist() == [16, 17, 18, 19, 20, 21] * 2
    waiting = slice(2 + 16, 2 + 22)
    for side, whole, back in zip(("key", "value"), (one.keys, one.values), held(two), strict=True):
        off = (back - whole).abs()
        assert off[:, :, waiting].max() == 0
        half = steps_of(two, whole[:, :, 2:], side)
        full = torch.tensor([slot for slot in range(32) if slot < 16 or slot >= 24])
        # Half a step; the scale, kept in 16 bits, is off by 2^-11, which moves the last of 255 codes by an eighth of a step.
        assert bool((off[:, :, 2:] <= 1.25 * half + 1e-6)[:, :, full].all())
        assert off[:, :, 2:][:, :, full].max() > 0.5 * half[:, :, full].max()


@pytest.mark.parametrize("kind", FLOATS)
def test_a_token_comes_back_as_the_format_has_it(kind):
    """Groups that are full are those of the exact cache on the format, a head's group as the whole; see test_float_grids."""
    model = model_of()
    exact, rounded = SinkCache(model, **SIZES), SinkCache(model, **SIZES, quantized=kind)
    one_by_one(model, TOKENS[:, :88], exact)
    one_by_one(model, TOKENS[:, :88], rounded)
    one, two = exact.layers[0], rounded.layers[0]
    for whole, back in zip((one.keys, one.values), held(two), strict=True):
        ring = whole[:, :, 2:].unflatten(2, (4, 8))
        expected = FORMATS[kind](ring, ring.abs().amax((-1, -2), keepdim=True)).flatten(2, 3)
        full = torch.tensor([slot for slot in range(32) if slot < 16 or slot >= 24])
        torch.testing.assert_close(back[:, :, 2:][:, :, full], expected[:, :, full])
        assert torch.equal(back[:, :, 2 + 16 : 2 + 22], whole[:, :, 2 + 16 : 2 + 22])
        assert not torch.equal(expected[:, :, full], whole[:, :, 2:][:, :, full])


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_at_a_time_or_in_chunks_is_the_same_up_to_what_a_chunk_sees_whole(kind):
    model = model_of()
    singly, chunked = (SinkCache(model, **SIZES, quantized=kind) for _ in range(2))
    one_by_one(model, TOKENS[:, :61], singly)
    read(model, TOKENS[:, :61], chunked)
    assert torch.equal(singly.layers[0].waiting, chunked.layers[0].waiting)
    for one, two in zip(held(singly.layers[0]), held(chunked.layers[0]), strict=True):
        # Keys that differ in their last bit may have scales that differ in theirs, which is 2^-11 of 16 bits.
        torch.testing.assert_close(one, two, rtol=2**-10, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "most"), [("int8", 0.02), ("int4", 0.3), ("fp8", 0.2), ("fp8b", 0.2), ("mxfp4", 0.6), ("nvfp4", 0.5)]
)
@pytest.mark.parametrize("way", [read, one_by_one])
def test_logits_hardly_move(way, kind, most):
    model = model_of()
    exact = way(model, TOKENS, SinkCache(model, **{**SIZES, "chunk": 7}))
    rounded = way(model, TOKENS, SinkCache(model, **{**SIZES, "chunk": 7}, quantized=kind))
    off = (rounded - exact).std() / exact.std()
    assert 1e-5 < off < most


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_row_is_the_row_alone(kind):
    model = model_of()
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), TOKENS[:1, :57]), dim=1)
    both = torch.cat((padded, TOKENS[1:, :60]))
    mask = torch.ones_like(both)
    mask[0, :3] = 0
    batch, alone = (SinkCache(model, **SIZES, quantized=kind) for _ in range(2))
    read(model, both, batch, attention_mask=mask)
    read(model, TOKENS[:1, :57], alone)
    for one, two in zip(held(batch.layers[0]), held(alone.layers[0]), strict=True):
        torch.testing.assert_close(one[:1], two, rtol=2**-10, atol=1e-4)


@pytest.mark.parametrize("kind", INTEGERS)
def test_a_rollback_goes_on_as_if_the_tokens_had_never_been(kind):
    model = model_of()
    back, straight = (SinkCache(model, **SIZES, quantized=kind) for _ in range(2))
    read(model, TOKENS[:, :30], back)
    back.crop(-9)  # from the last group into the one before, which has been rounded
    read(model, TOKENS[:, :21], straight)
    for cache in (back, straight):
        one_by_one(model, TOKENS[:, 40:52], cache)
    for one, two in zip(held(back.layers[0]), held(straight.layers[0]), strict=True):
        # Tokens of the group that was opened again have been rounded twice; the others are equal.
        off = (one - two).abs()
        assert off[:, :, : 2 + 16].max() < 1e-5
        assert off[:, :, 2 + 16 : 2 + 24].max() < (0.05 if kind == "int8" else 0.5)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.28), ("int4", 0.16)])
def test_it_takes_a_fraction_of_the_memory(kind, most):
    """Heads of 64, 4,096 tokens: codes, grids of 3 bytes (a token of values, 1/64 of a channel of keys), 64 whole tokens."""
    config = build(ZOO["llama"], "sdpa").config
    config.head_dim, config.num_attention_heads, config.num_key_value_heads = 64, 2, 2
    model = type(build(ZOO["llama"], "sdpa"))(config).eval()
    exact, rounded = (SinkCache(model, num_sinks=4, window=4091, quantized=quantized) for quantized in (None, kind))
    read(model, TOKENS, exact)
    read(model, TOKENS, rounded)
    codes = 64 * int(kind[3:]) // 8
    expected = (4096 * (2 * codes + 3 * 64 / 64 + 3) + 64 * 2 * 64 * 4 + 4 * 2 * 64 * 4 + 4096) / (
        2 * 4 * 64 * 4096 + 4 * 64 * 4
    )
    ratio = rounded.bytes_held() / exact.bytes_held()
    assert ratio == pytest.approx(expected, rel=0.01)
    assert ratio <= most


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_with_the_same_bits(tmp_path, kind):
    model = model_of()
    cache = SinkCache(model, **SIZES, quantized=kind)
    read(model, TOKENS[:, :60], cache)
    save_state(cache, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors", model).cache
    assert again.quantized == kind
    for more in (TOKENS[:, 60:63], TOKENS[:, 63:64], TOKENS[:, 64:]):
        torch.testing.assert_close(read(model, more, again), read(model, more, cache), rtol=0, atol=0)


def test_rows_are_reordered():
    model = model_of()
    cache, straight = SinkCache(model, **SIZES, quantized="int8"), SinkCache(model, **SIZES, quantized="int8")
    read(model, TOKENS[:, :50], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    read(model, TOKENS.flip(0)[:, :50], straight)
    more = TOKENS[:, 50:51]
    torch.testing.assert_close(read(model, more, cache), read(model, more, straight), rtol=1e-5, atol=1e-5)


def test_a_large_ring_has_groups_of_64_and_a_small_one_has_four():
    model = model_of()
    groups = {window: SinkCache(model, num_sinks=1, window=window, quantized="int4").layers[0].group for window in (2, 31, 999)}
    assert groups == {2: 1, 31: 8, 999: GROUP}


def test_what_cannot_be_quantised_is_refused_in_a_line():
    for wrong in ("int3", True, 8):
        with pytest.raises(
            ConfigurationError,
            match=rf"`quantized` {wrong!r} is none of int8, int4, fp8, fp8b, mxfp4, nvfp4; None keeps the dtype",
        ):
            SinkCache(model_of(), **SIZES, quantized=wrong)
