"""Sinks apart: chunks whose sinks are attended to beside the window give what their tokens give one by one."""

from __future__ import annotations

import pytest
import torch
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, build_decoder, decoder, gap, one_by_one, read, text

from sinklab.attention.session import attend
from sinklab.errors import UnsupportedModelError
from sinklab.streaming import apart
from sinklab.streaming.cache import SinkCache

LENGTH = 60


@torch.no_grad()
@pytest.mark.parametrize("quantized", [None, "int8"])
def test_as_one_by_one(quantized, monkeypatch):
    model, tokens, seen = decoder("llama"), text(LENGTH), []
    original = apart._with_sinks

    def noted(query, window, total, keys, values, scaling):
        seen.append((query.shape[2], keys.shape[2:4]))
        return original(query, window, total, keys, values, scaling)

    monkeypatch.setattr(apart, "_with_sinks", noted)
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


@torch.no_grad()
def test_sinks_are_not_lost():
    """Attention that is computed elsewhere all of a sudden is refused, and never done without sinks."""
    model = build_decoder("llama")
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    read(model, text(20), cache)
    cache._apart._modules = set()
    with pytest.raises(UnsupportedModelError, match="computed attention where it could not be seen, without its sinks"):
        read(model, text(20), cache)
