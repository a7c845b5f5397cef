"""Every decoder family: the cache follows the published rule of StreamingLLM, and is dense before it is full."""

from __future__ import annotations

import pytest
import torch
from tests.streaming.decoders import (
    FAMILIES,
    SINKS,
    TOLERANCE,
    WINDOW,
    backends_of,
    build_decoder,
    decoder,
    gap,
    one_by_one,
    read,
    sliding,
    text,
)
from tests.streaming.oracle import slow_logits

from sinklab.streaming.cache import SinkCache

LENGTH = 40
CASES = [(family, backend) for family in FAMILIES for backend in backends_of(family)]


def test_there_are_enough_families():
    assert len(FAMILIES) >= 15


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_as_published(family, backend):
    model, tokens = decoder(family, backend), text(LENGTH)
    published = slow_logits(model, tokens, SINKS, WINDOW)
    assert gap(one_by_one(model, tokens), published) < TOLERANCE
    assert gap(read(model, tokens), published) < TOLERANCE
    assert gap(read(model, tokens, pieces=[19, 1, 1, 7, 12]), published) < TOLERANCE
    # In chunks, and with positions counted anew as often as there is room for.
    tight = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=5, rebase_at=SINKS + WINDOW + 6)
    assert gap(read(model, tokens, tight), published) < TOLERANCE
    assert tight.table.rebases >= 3


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_dense_before_it_is_full(family, backend):
    model, tokens = decoder(family, backend), text(SINKS + WINDOW + 1)
    with torch.no_grad():
        dense = model(input_ids=tokens, use_cache=False).logits
    assert gap(one_by_one(model, tokens), dense) < TOLERANCE
    assert gap(read(model, tokens), dense) < TOLERANCE


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_original_positions_are_a_mask(family, backend):
    """With original positions the stream is the dense model under the policy's mask."""
    model, tokens = build_decoder(family, backend, **sliding(family, LENGTH)), text(LENGTH)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, positions="original")
    index = torch.arange(LENGTH)
    visible = cache.policy.visible(index[:, None], index).expand(len(tokens), 1, -1, -1)
    mask = visible if backend == "sdpa" else torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        dense = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    assert gap(one_by_one(model, tokens, cache), dense) < TOLERANCE
    cache.reset()
    assert gap(read(model, tokens, cache, pieces=[19, 1, 20]), dense) < TOLERANCE
