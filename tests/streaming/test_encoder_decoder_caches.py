"""Encoder–decoders of the family of T5: the decoder's own cache is bounded, and the keys of cross-attention stay whole."""

from __future__ import annotations

from functools import cache as once

import pytest
import torch
import transformers
from tests.architectures.zoo import PAD_TOKEN, T5, enliven
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, SlowLayer, gap, text
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from sinklab.attention.host_arguments import cache_argument
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.cache import PolicyCache, SinkCache

FAMILIES = ("T5", "MT5", "UMT5", "LongT5", "SwitchTransformers")
LENGTH, LAYERS = 40, 3
"""The decoder has a layer more than the encoder, as some checkpoints have."""

GREEDY = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}


@once
def build(family: str, backend: str = "eager") -> PreTrainedModel:
    torch.manual_seed(0)
    fields = {**T5, "num_decoder_layers": LAYERS}
    if family == "SwitchTransformers":
        fields |= {"num_experts": 2, "expert_capacity": 64, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}ForConditionalGeneration")._from_config(config, attn_implementation=backend)
    enliven(model, seed=7)
    return model.eval()


@torch.no_grad()
def encoded(model: PreTrainedModel, rows: int = 2) -> BaseModelOutput:
    return model.get_encoder()(input_ids=text(7, rows, seed=3))


def wrapped(cache: Cache) -> EncoderDecoderCache:
    return EncoderDecoderCache(cache, DynamicCache())


def small(model=None, **settings) -> EncoderDecoderCache:
    return wrapped(SinkCache(model, num_sinks=SINKS, window=WINDOW, **settings))


@torch.no_grad()
def read(model, tokens, cache, pieces=None, **arguments):
    """Logits of all tokens of the decoder, given in calls of these lengths."""
    source = encoded(model, len(tokens))
    found = [
        model(
            encoder_outputs=source, decoder_input_ids=piece, **cache_argument(model, cache), use_cache=True, **arguments
        ).logits
        for piece in tokens.split(pieces or [tokens.shape[1]], dim=1)
    ]
    return torch.cat(found, dim=1)


def slow(model, tokens):
    """The published rule: the model itself sees a cache that is trimmed after every step."""
    layers = [SlowLayer(None, SINKS, WINDOW) for _ in range(LAYERS)]
    return read(model, tokens, wrapped(Cache(layers=layers)), [1] * tokens.shape[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_as_published(family):
    model, tokens = build(family), text(LENGTH)
    published = slow(model, tokens)
    assert gap(read(model, tokens, small(model), [1] * LENGTH), published) < TOLERANCE
    assert gap(read(model, tokens, small(model)), published) < TOLERANCE
    assert gap(read(model, tokens, small(model, chunk=5), [19, 1, 1, 7, 12]), published) < TOLERANCE
    with torch.no_grad():
        whole = model(encoder_outputs=encoded(model), decoder_input_ids=tokens, use_cache=False).logits
    fits = SINKS + WINDOW + 1
    assert gap(published[:, :fits], whole[:, :fits]) < TOLERANCE
    assert gap(published[:, fits:], whole[:, fits:]) > 0.1  # what is evicted is missed


def test_sdpa_and_other_policies():
    model, tokens = build("T5", "sdpa"), text(LENGTH)
    assert gap(read(model, tokens, small(model)), slow(build("T5"), tokens)) < TOLERANCE
    for policy in (Pinned(pinned=(0, 5, 20), window=6), SinkWindow(num_sinks=0, window=WINDOW)):
        at_once = read(model, tokens, wrapped(PolicyCache(policy, model)))
        assert gap(read(model, tokens, wrapped(PolicyCache(policy, model)), [1] * LENGTH), at_once) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family):
    """Greedy tokens are those of the slow rule; the cache finds its model by itself, and cross-attention is encoded once."""
    model, source, cache = build(family), text(7, seed=3), small()
    found = model.generate(source, past_key_values=cache, **GREEDY)
    inner = cache.self_attention_cache
    assert inner.model is model
    assert inner.telemetry().held == (SINKS + WINDOW + 1,) * 2
    assert [layer.keys.shape[2] for layer in cache.cross_attention_cache.layers] == [7] * LAYERS
    logits = slow(model, found[:, :-1])
    logits[..., model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens has it
    assert (logits.argmax(dim=-1) == found[:, 1:]).all()


def test_beams():
    """Rows of both caches go along: a cache that holds all gives the beams of a growing one."""
    model, source = build("T5"), text(7, seed=3)
    caches = wrapped(DynamicCache()), wrapped(SinkCache(num_sinks=SINKS, window=60))
    found = [model.generate(source, past_key_values=cache, num_beams=3, **GREEDY) for cache in caches]
    assert (found[0] == found[1]).all()


@torch.no_grad()
def test_padded_rows():
    model, rows = build("T5"), [text(length, rows=1, seed=length)[0] for length in (24, 17)]
    tokens, mask = torch.full((2, 24), PAD_TOKEN), torch.zeros(2, 24, dtype=torch.long)
    for row, ids in enumerate(rows):
        tokens[row, 24 - len(ids) :], mask[row, 24 - len(ids) :] = ids, 1
    found = read(model, tokens, small(model), decoder_attention_mask=mask)
    for row, ids in enumerate(rows):
        assert gap(found[row, 24 - len(ids) :], slow(model, ids.expand(2, -1))[row]) < TOLERANCE


def test_taken_back_reset_and_used_again():
    model, tokens, cache = build("T5"), text(LENGTH), small(build("T5"))
    read(model, tokens[:, :10], cache)
    cache.self_attention_cache.crop(-4)
    assert cache.get_seq_length() == 6
    assert gap(read(model, tokens[:, 6:], cache), slow(model, tokens)[:, 6:]) < TOLERANCE
    inner = cache.self_attention_cache
    inner.reset()
    assert inner.get_seq_length() == 0
    assert gap(read(model, tokens, wrapped(inner)), slow(model, tokens)) < TOLERANCE  # another source, another cross-attention


def test_refused():
    model = build("T5")
    bare = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    with pytest.raises(ConfigurationError, match=r"has cross-attention too.*EncoderDecoderCache\(SinkCache"):
        model.generate(text(7), past_key_values=bare, **GREEDY)
    crossed = EncoderDecoderCache(DynamicCache(), SinkCache(num_sinks=SINKS, window=WINDOW))
    with pytest.raises(ConfigurationError, match=r"keys by no model that it belongs to, as those of cross-attention"):
        model.generate(text(7), past_key_values=crossed, **GREEDY)
    with pytest.raises(UnsupportedModelError, match=r"counts the keys .* wants those in the text, with gaps"):
        small(model, positions="original")
