"""Far positions: a stream at token one million says what it would say near its beginning, against oracles in float64."""

import copy
import functools

import pytest
import torch
from tests.architectures.zoo import enliven
from tests.conftest import TINY
from tests.streaming.decoders import SINKS, WINDOW, gap, one_by_one, read, slow_logits, text

from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.streaming.cache import SinkCache

MILLION = 1_000_000 // (WINDOW + 1) * (WINDOW + 1)
"""A multiple of the ring, so that slots are the same as near the beginning."""
MEMORY = 4 * (WINDOW + 1)
"""Tokens after which a stream of two layers has forgotten what is no sink: what a token says depends on the window before it,
whose tokens depend on the windows before them."""
TOLERANCE = 1e-4


@functools.cache
def models():
    """A model of two layers in float32, and the same in float64 with the same frequencies, so with angles of float64."""
    model = SinkLM(SinkLMConfig(**TINY)).eval()
    enliven(model, seed=1)
    exact = copy.deepcopy(model).double()
    size = model.config.head_dim
    # As a float32 model has them: a million steps by a frequency that is rounded elsewhere end elsewhere.
    frequencies = (1e4 ** -(torch.arange(0, size, 2).float() / size)).double()

    def rotation(position_ids, dtype):
        angles = position_ids[:, None, :, None].double() * frequencies
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)

    exact.position.rotation = rotation
    return model, exact


def forgetful(tokens, length):
    """Logits of the last tokens of a stream by the published rule in float64: all keys rotated anew from their unrotated form.

    The sinks and as much of the text as matters are read in its place, with the positions in the cache that they have there.
    """
    recent = tokens[:, max(SINKS, tokens.shape[1] - length - MEMORY) :]
    return slow_logits(models()[1], torch.cat((tokens[:, :SINKS], recent), dim=1), SINKS, WINDOW)[:, -length:]


@torch.no_grad()
def masked(tokens, length, start):
    """The same for original positions: one dense pass in float64 under the policy's mask; the text stands at ``start``."""
    recent = tokens[:, tokens.shape[1] - length - MEMORY :]
    first = start + tokens.shape[1] - recent.shape[1]
    positions = torch.cat((torch.arange(SINKS), torch.arange(first, first + recent.shape[1])))
    visible = SinkCache(num_sinks=SINKS, window=WINDOW).policy.visible(positions[:, None], positions)[None, None]
    whole = torch.cat((tokens[:, :SINKS], recent), dim=1)
    return models()[1](input_ids=whole, attention_mask=visible, position_ids=positions[None]).logits[:, -length:]


def carry(cache, steps):
    """Put a full cache ``steps`` tokens ahead, as if as many had gone by and the same ones were held."""
    table = cache.table
    table.seen, table.base, table.columns = table.seen + steps, table.base + steps, table.columns + steps
    table.index[:, SINKS:] += steps


@pytest.mark.parametrize("positions", ["in_cache", "original"])
def test_a_million_tokens_ahead(positions):
    """Near its beginning and a million tokens on, a stream says the same under in-cache positions: it turns by differences.
    Under original ones the sinks are a million steps away, in angles of float64."""
    tokens = text(150)
    for pieces in ([1] * 50, [7, 1, 1, 30, 11]):
        cache = SinkCache(models()[0], num_sinks=SINKS, window=WINDOW, positions=positions, rebase_at=40, chunk=20)
        near = read(models()[0], tokens[:, :100], cache)
        twin = copy.deepcopy(cache)
        carry(cache, MILLION)
        far = read(models()[0], tokens[:, 100:], cache, pieces=pieces)
        assert cache.get_seq_length() == MILLION + 150
        assert near.isfinite().all()
        if positions == "in_cache":
            assert gap(far, read(models()[0], tokens[:, 100:], twin, pieces=pieces)) == 0
            assert gap(far[:, -10:], forgetful(tokens, 10)) < TOLERANCE
        else:
            assert gap(far[:, -5:], masked(tokens, 5, MILLION)) < TOLERANCE
            assert gap(far[:, -5:], masked(tokens, 5, 0)) > 0.1  # it does depend on the distance


def test_before_positions_are_counted_anew():
    """At the position where the default counts anew, float32 angles are as good as they have to be."""
    model, tokens = models()[0], text(2_300, rows=1)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    assert cache.rebase_at == 2_048
    found = read(model, tokens, cache, pieces=[1_900, *[1] * 148, 252])
    assert cache.table.rebases == 1
    for last in (2_047, 2_048, 2_049, 2_300):
        assert gap(found[:, last - 20 : last], forgetful(tokens[:, :last], 20)) < TOLERANCE


def test_the_oracle_forgets():
    """It is the slow reading of everything where that can be had."""
    tokens = text(120)
    everything = slow_logits(models()[1], tokens, SINKS, WINDOW)
    assert gap(everything[:, -30:], forgetful(tokens, 30)) < 1e-10
    cache = SinkCache(models()[1], num_sinks=SINKS, window=WINDOW, positions="original")
    assert gap(one_by_one(models()[1], tokens, cache)[:, -30:], masked(tokens, 30, 0)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["in_cache", "original"])
def test_a_million_tokens(positions):
    """Read for good, 1,048,576 tokens: a minute or two each.

    Under in-cache positions in float64, where what is left does not hide behind the rounding of logits: 1e-5 to 3e-5 at every
    length. In float32 it goes from 2e-5 to 1e-4 with the text, and does not grow with the length either.
    """
    model, tokens = models()[int(positions == "in_cache")], text(2**20, rows=1)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, positions=positions, chunk=512)
    at = 0
    for last in (2_000, 32_768, 100_000, 2**18, 500_000, 2**20):
        while at < last - 40:
            piece = min(512, last - 40 - at)
            read(model, tokens[:, at : at + piece], cache)
            at += piece
        found = read(model, tokens[:, at:last], cache, pieces=[13, *[1] * 27])
        at = last
        text_so_far = tokens[:, :last]
        expected = forgetful(text_so_far, 40) if positions == "in_cache" else masked(text_so_far, 40, 0)
        assert gap(found, expected) < TOLERANCE, last
    assert cache.table.highest_position < 2_048
