"""A million tokens through the embedded model: all numbers finite, memory and time flat, and the same words at the end."""

from __future__ import annotations

import resource
import statistics
import time

import pytest
import torch
from tests.streaming.decoders import gap

from sinklab.models.loading import load_model
from sinklab.streaming.cache import SinkCache

SINKS, WINDOW, CHUNK = 1, 63, 64
TOKENS = 1_000_000
SINGLE = 10_000
"""Of these, read one at a time at the beginning, and as many at the end; the others in chunks, twenty times as fast."""


@pytest.mark.slow
@torch.no_grad()
def test_a_million_tokens():
    """About three minutes on one free core."""
    model = load_model("embedded:softmax").model
    tokens = torch.randint(4, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=CHUNK)

    def read(first: int, last: int, size: int) -> tuple[list[float], torch.Tensor]:
        times: list[float] = []
        for piece in tokens[:, first:last].split(size, dim=1):
            begun = time.thread_time()
            logits = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            times.append(time.thread_time() - begun)
            assert logits.isfinite().all()
        return times, logits

    warm = 4 * CHUNK
    read(0, warm, CHUNK)
    early, _ = read(warm, warm + SINGLE, 1)
    held, used = cache.bytes_held(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read(warm + SINGLE, TOKENS - SINGLE, CHUNK)
    late, said = read(TOKENS - SINGLE, TOKENS, 1)

    assert cache.get_seq_length() == TOKENS
    assert cache.bytes_held() == held
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 32 * 1024  # KiB; the tokens alone are 8 MiB
    # Processor time, medians of 10,000 steps each: other work on the machine may move them by a part, through the caches that
    # it shares; something that grows with the tokens read would by a factor.
    assert statistics.median(late) < 1.5 * statistics.median(early)

    # A stream of some layers has forgotten what is more than as many windows back: begun there, it says the same.
    memory = (model.config.num_hidden_layers + 1) * (WINDOW + 1)
    recent = torch.cat((tokens[:, :SINKS], tokens[:, -memory:]), dim=1)
    fresh = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=CHUNK)
    anew = model(input_ids=recent, past_key_values=fresh, use_cache=True, logits_to_keep=1).logits
    assert gap(said, anew) < 1e-3  # float32 angles at positions of up to 2,048, through six layers
