"""Models with layers of full attention and layers whose sliding window is narrower than what the policy holds."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tests.streaming.decoders import (
    SHAPE,
    SHARED,
    SINKS,
    TOLERANCE,
    WINDOW,
    assert_as_published,
    assert_generated_as_dense,
    backends_of,
    build_decoder,
    gap,
    one_by_one,
    read,
    text,
)

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.reader import open_reader
from sinklab.streaming.slot_table import WindowedTable
from sinklab.streaming.state import load_state, save_state

OWN = 5
"""Tokens that the narrow layers see, the query's own included."""

LENGTH = 40
FAMILIES = ("gemma2", "gemma3", "olmo3", "cohere2", "gpt_oss", "granite_swa", "mimo_v2_flash")
CASES = [(family, backend) for family in FAMILIES for backend in backends_of(family)]
TURNS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


def mixed(family="gemma3", backend="eager", own=OWN):
    return build_decoder(family, backend, **TURNS, sliding_window=own)


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_as_published(family, backend):
    """Full layers follow StreamingLLM; in narrow ones the mask of the model itself leaves the slow cache's last tokens."""
    model = mixed(family, backend)
    assert isinstance(SinkCache(model, num_sinks=SINKS, window=WINDOW).table, WindowedTable)
    assert_as_published(model)


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_original_positions_are_a_mask_for_each_kind_of_layer(family, backend):
    model, tokens = mixed(family, backend), text(LENGTH)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, positions="original")
    index = torch.arange(LENGTH)
    distance = index[:, None] - index
    masks = {
        "full_attention": cache.policy.visible(index[:, None], index),
        "sliding_attention": (distance >= 0) & (distance < OWN),
    }
    for kind, visible in masks.items():
        visible = visible.expand(len(tokens), 1, -1, -1)
        hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        masks[kind] = visible if backend == "sdpa" else hidden
    with torch.no_grad():
        dense = model(input_ids=tokens, attention_mask=masks, use_cache=False).logits
    assert gap(one_by_one(model, tokens, cache), dense) < TOLERANCE
    cache.reset()
    assert gap(read(model, tokens, cache, pieces=[19, 1, 20]), dense) < TOLERANCE


def test_layers_that_share_the_keys_of_narrow_and_of_full_ones():
    config, changes = SHARED["Gemma3n"]
    turns = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": OWN}
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(getattr(transformers, config)(**SHAPE, **{**changes, **turns})).eval()
    model.apply(lambda module: [torch.nn.init.normal_(weight, 0, 0.25) for weight in module.parameters() if weight.ndim > 1])
    assert_as_published(model)


def test_dense_before_it_is_full():
    """With narrow layers far past their window, as in the model itself."""
    model, tokens = mixed(), text(30)
    with torch.no_grad():
        dense = model(input_ids=tokens, use_cache=False).logits
    for chunk in (128, 7, 1):
        assert gap(read(model, tokens, SinkCache(model, num_sinks=SINKS, window=40, chunk=chunk)), dense) < TOLERANCE


def test_a_window_as_wide_as_the_policy_follows_it():
    """Then every layer has the sinks, whose distances in the cache are within its window."""
    assert not isinstance(SinkCache(mixed(own=SINKS + WINDOW + 1), num_sinks=SINKS, window=WINDOW).table, WindowedTable)


def test_padded_rows_in_several_turns_are_the_rows_alone():
    model, tokens = mixed(), text(40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :7] = mask[0, 20:23] = 0  # on the left, and between two turns
    cache, logits = SinkCache(model, num_sinks=SINKS, window=WINDOW), []
    for start, end in ((0, 3), (3, 12), (12, 13), (13, 20), (20, 40)):
        logits.append(read(model, tokens[:, start:end], cache, attention_mask=mask[:, :end]))
    found = torch.cat(logits, dim=1)
    for row in range(2):
        there = mask[row].bool()
        assert gap(found[row : row + 1, there], one_by_one(model, tokens[row : row + 1, there])) < TOLERANCE


def test_generated_as_with_a_cache_of_transformers():
    assert_generated_as_dense(mixed())


def test_with_an_assistant_and_taken_back():
    """Tokens that a crop brings back into a window are there again in both kinds of layers, or it is refused in both."""
    model, tokens = mixed(), text(40, rows=1)
    plain = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    expected = one_by_one(model, tokens, plain)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, rollback=3)
    read(model, torch.cat((tokens[:, :30], tokens[:, :3]), dim=1), cache)
    cache.crop(-3)
    assert gap(one_by_one(model, tokens[:, 30:], cache), expected[:, 30:]) < TOLERANCE
    read(model, tokens[:, :20], small := SinkCache(model, num_sinks=SINKS, window=30))
    before = small.table.seen.clone(), small.table.narrow.seen.clone()
    with pytest.raises(ConfigurationError, match="have been evicted since"):
        small.crop(-2)  # there in the full layers, and gone in the narrow ones
    assert (small.table.seen, small.table.narrow.seen) == before


def test_a_stream_resumed_from_a_file_and_one_that_was_copied(tmp_path):
    model, tokens = mixed(), text(60, rows=1)
    whole = SinkCache(model, num_sinks=SINKS, window=WINDOW, rebase_at=40, chunk=8)
    read(model, tokens[:, :45], whole)
    assert whole.table.rebases
    save_state(whole, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors", model)
    copied = copy.deepcopy(whole)
    expected = one_by_one(model, tokens[:, 45:], whole)
    assert torch.equal(one_by_one(model, tokens[:, 45:], again.cache), expected)
    assert torch.equal(one_by_one(model, tokens[:, 45:], copied), expected)


def test_bytes_are_those_of_what_each_layer_holds():
    model = mixed()
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    read(model, text(30), cache)
    narrow, full = (layer.bytes_held() for layer in cache.layers[:2])
    assert narrow / full == pytest.approx(OWN / (SINKS + WINDOW + 1 + SINKS / 2))  # keys of pinned tokens are there twice
    assert cache.bytes_held() == 2 * (narrow + full)


def test_in_integers():
    model, tokens = mixed(own=12), text(40)
    exact = one_by_one(model, tokens, SinkCache(model, num_sinks=SINKS, window=32))
    small = SinkCache(model, num_sinks=SINKS, window=32, quantized="int8")
    assert 0 < gap(one_by_one(model, tokens, small), exact) < 0.5


def test_refused():
    """Policies whose heads hold tokens of their own, for which all layers are alike; and a model of narrow layers alone."""
    for policy in ({"name": "per_head", "budgets": [[[1, 8]] * 2] * 4},):
        with pytest.raises(UnsupportedModelError, match="layers that see 5 tokens"):
            open_reader(mixed(), policy)
    with pytest.raises(UnsupportedModelError, match="layers that see 5 tokens"):
        SinkCache(build_decoder("mistral", "eager", sliding_window=OWN), num_sinks=SINKS, window=WINDOW)
