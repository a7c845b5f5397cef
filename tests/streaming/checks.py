"""What every kind of model has to do under a bounded cache, whatever its layers."""

from __future__ import annotations

import torch
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, gap, one_by_one, read, text
from tests.streaming.oracle import slow_logits
from transformers import PreTrainedModel

from sinklab.attention.forward_arguments import cache_argument
from sinklab.streaming.cache import SinkCache

__all__ = ["assert_as_published", "assert_dense_before_it_is_full", "assert_generated_as_dense"]

PIECES = (19, 1, 1, 7, 12)
"""Calls in which a text of 40 tokens may come."""


def assert_as_published(model: PreTrainedModel) -> None:
    """It gives the logits of the published rule, computed slowly: token by token, at once, in calls of any size, and in chunks
    with positions counted anew as often as there is room for."""
    tokens = text(sum(PIECES))
    published = slow_logits(model, tokens, SINKS, WINDOW)
    assert gap(one_by_one(model, tokens), published) < TOLERANCE
    assert gap(read(model, tokens), published) < TOLERANCE
    assert gap(read(model, tokens, pieces=PIECES), published) < TOLERANCE
    tight = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=5, rebase_at=SINKS + WINDOW + 6)
    assert gap(read(model, tokens, tight), published) < TOLERANCE
    assert tight.table.rebases >= 3


def assert_dense_before_it_is_full(model: PreTrainedModel) -> None:
    """As long as nothing is evicted the logits are those without a cache."""
    tokens = text(SINKS + WINDOW + 1)
    with torch.no_grad():
        dense = model(input_ids=tokens, use_cache=False).logits
    assert gap(one_by_one(model, tokens), dense) < TOLERANCE
    assert gap(read(model, tokens), dense) < TOLERANCE


def assert_generated_as_dense(model: PreTrainedModel) -> None:
    """As long as nothing is evicted generate() gives the tokens that it gives with a cache of transformers: greedily, and by
    beams, whose rows change places, of a batch of two lengths."""
    prompt = text(9)
    prompt[1, :3] = 0
    given = {"input_ids": prompt, "attention_mask": (prompt > 0).long(), "max_new_tokens": 12, "do_sample": False}
    for beams in (1, 3):
        usual = model.generate(**given, num_beams=beams)
        cache = SinkCache(num_sinks=SINKS, window=40)
        assert torch.equal(model.generate(**given, num_beams=beams, **cache_argument(model, cache)), usual)
