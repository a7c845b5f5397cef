"""Every decoder family: the cache follows the published rule of StreamingLLM, and is dense before it is full."""

from __future__ import annotations

import pytest
import torch
from tests.streaming.checks import assert_as_published, assert_dense_before_it_is_full
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

from sinklab.streaming.cache import SinkCache

LENGTH = 40
CASES = [(family, backend) for family in FAMILIES for backend in backends_of(family)]


def test_there_are_enough_families():
    assert len(FAMILIES) >= 15


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_as_published(family, backend):
    assert_as_published(decoder(family, backend))


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_dense_before_it_is_full(family, backend):
    assert_dense_before_it_is_full(decoder(family, backend))


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
