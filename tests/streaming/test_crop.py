"""Taking tokens back: exactly, as long as none has been evicted that would be held again."""

from __future__ import annotations

import pytest
import torch
from tests.streaming.decoders import (
    SINKS,
    TOLERANCE,
    WINDOW,
    decoder,
    gap,
    read,
    slow_logits,
    text,
)

from sinklab.errors import ConfigurationError
from sinklab.streaming.cache import SinkCache


def small(model=None, **settings) -> SinkCache:
    return SinkCache(model, num_sinks=SINKS, window=WINDOW, **settings)


def test_a_pinned_token_taken_back_comes_again():
    model, cache = decoder("llama"), small(decoder("llama"))
    read(model, text(3), cache)
    cache.crop(1)
    tokens = torch.cat((text(3)[:, :1], text(30, seed=4)), dim=1)
    assert gap(read(model, tokens[:, 1:], cache), slow_logits(model, tokens, SINKS, WINDOW)[:, 1:]) < TOLERANCE


def padded(tokens: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row alone with padding in front, as of ``pad_to_multiple_of``, and its mask."""
    return torch.nn.functional.pad(tokens, (columns, 0)), torch.nn.functional.pad(torch.ones_like(tokens), (columns, 0))


@pytest.mark.parametrize("back", [1, 3, 5])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_taken_back_of_a_row_with_padding_in_front(family, back):
    """Padding is counted in columns and is no token."""
    model = decoder(family, "eager")
    length = SINKS + WINDOW
    tokens, mask = padded(text(length, rows=1), 3)
    cache = small(model)
    read(model, tokens, cache, attention_mask=mask)
    cache.crop(-back)
    assert cache.get_seq_length() == length + 3 - back
    assert cache.telemetry().seen == (length - back,)
    whole = torch.cat((text(length, rows=1)[:, : length - back], text(6, rows=1, seed=4)), dim=1)
    expected = read(model, whole, SinkCache(model, num_sinks=SINKS, window=WINDOW))
    assert gap(read(model, whole[:, -6:], cache), expected[:, -6:]) < TOLERANCE


def test_taken_back_of_a_row_with_padding_behind():
    model, cache = decoder("llama"), small(decoder("llama"))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    read(model, text(8, rows=1), cache, attention_mask=mask)
    with pytest.raises(ConfigurationError, match="cannot go back to 6 columns: there is padding behind them"):
        cache.crop(-2)
    cache.crop(-8)
    assert gap(read(model, text(9, rows=1), cache), read(model, text(9, rows=1))) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gptj", "codegen"])
@pytest.mark.parametrize("keep", [0, 1, SINKS])
def test_back_to_the_sinks_once_positions_were_counted_anew(family, keep):
    """No position is below 0, where tables of some models have none, or that of their last."""
    model, tokens = decoder(family, "eager"), text(50)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=5, rebase_at=20)
    read(model, tokens, cache)
    assert cache.table.rebases >= 1
    cache.crop(keep - 50)
    assert bool((cache.describe()["position"] >= 0).all())
    whole = torch.cat((tokens[:, :keep], text(30, seed=4)), dim=1)
    assert gap(read(model, whole[:, keep:], cache), slow_logits(model, whole, SINKS, WINDOW)[:, keep:]) < TOLERANCE


def test_what_has_been_evicted_does_not_come_back():
    model, cache = decoder("llama"), small(decoder("llama"))
    read(model, text(30), cache)
    with pytest.raises(ConfigurationError, match=r"cannot go back to 29 tokens: 1 of the 12 .* have been evicted since"):
        cache.crop(-1)
