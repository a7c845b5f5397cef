"""Steps and books: any cut of a text reads alike, the tables say what is held, and each known mistake would be seen."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, decoder, gap, one_by_one, read, text
from tests.streaming.oracle import slow_logits

from sinklab.errors import ConfigurationError
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.step import Books

LENGTH = 50
CPU = torch.device("cpu")


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    pieces=strategies.lists(strategies.integers(1, 20), min_size=1, max_size=12),
    chunk=strategies.integers(1, 24),
    num_sinks=strategies.integers(0, 4),
    window=strategies.integers(1, 12),
    room=strategies.integers(0, 3),
    positions=strategies.sampled_from(("in_cache", "original")),
)
def test_any_cut_reads_alike(pieces, chunk, num_sinks, window, room, positions):
    model = decoder("llama")
    tokens = text(sum(pieces))
    sizes = {"num_sinks": num_sinks, "window": window, "positions": positions}
    tight = num_sinks + window + 1 + chunk + room
    cut = read(model, tokens, SinkCache(model, **sizes, chunk=chunk, rebase_at=tight), pieces=pieces)
    single = one_by_one(model, tokens, SinkCache(model, **sizes))
    assert gap(cut, single) < TOLERANCE


# --- mistakes ----------------------------------------------------------------------------------------------------------------


MISTAKES = {
    "sinks stay where they were": (SinkWindow, "evicted", lambda native, self, queries: native(self, queries) * 0),
    "sinks turned by one too few": (
        SinkWindow,
        "evicted",
        lambda native, self, queries: (native(self, queries) - 1).clamp(min=0),
    ),
    "sinks turned with the first eviction one step late": (
        SinkWindow,
        "evicted",
        lambda native, self, queries: native(self, queries - 1),
    ),
    "a window of one more": (
        SinkWindow,
        "visible",
        lambda native, self, queries, keys: native(self, queries - 1, keys) | (queries == keys),
    ),
    "sinks hidden in a chunk": (
        SinkWindow,
        "visible",
        lambda native, self, queries, keys: (queries - keys >= 0) & (queries - keys <= self.window),
    ),
    "a chunk that looks ahead": (SinkWindow, "visible", lambda native, self, queries, keys: native(self, queries + 1, keys)),
    "keys in the wrong slot": (
        SinkWindow,
        "slots",
        lambda native, self, tokens: native(self, tokens + (tokens >= 2 * self.window)),
    ),
    "keys moved the wrong way": (SlotLayer, "move", lambda native, self, steps: native(self, -steps)),
    "keys not moved": (SlotLayer, "move", lambda native, self, steps: None),
}
"""What sink caches have got wrong, as changes of one method: new keys one position off once the window is full, as transformers
had it; window masks that hide the sinks inside a chunk; eviction one step late."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake, monkeypatch):
    """On these models, with these texts, a mistake moves logits a thousand times as far as the tolerance."""
    model, tokens = decoder("llama"), text(LENGTH)
    published = slow_logits(model, tokens, SINKS, WINDOW)

    def distance():
        tight = {"num_sinks": SINKS, "window": WINDOW, "rebase_at": 30}
        single = one_by_one(model, tokens, SinkCache(model, chunk=1, **tight))
        return max(gap(single, published), gap(read(model, tokens, SinkCache(model, chunk=6, **tight)), published))

    assert distance() < TOLERANCE
    owner, name, wrong = MISTAKES[mistake]
    native = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: wrong(native, *args))
    assert distance() > 1000 * TOLERANCE


def test_the_old_rule_of_transformers_shows():
    """Positions that only the older keys are shifted to, the new key standing one too far: the mistake that went unnoticed."""
    model, tokens = decoder("llama"), text(LENGTH)
    published = slow_logits(model, tokens, SINKS, WINDOW)
    cache, found = SinkCache(model, num_sinks=SINKS, window=WINDOW), []
    plan = cache.books.plan

    def off_by_one(length, valid):
        step = plan(length, valid)
        full = cache.books.columns > SINKS + WINDOW + 1
        return dataclasses.replace(step, position_ids=step.position_ids + int(full))

    cache.books.plan = off_by_one
    found = one_by_one(model, tokens, cache)
    assert gap(found[:, : SINKS + WINDOW + 1], published[:, : SINKS + WINDOW + 1]) < TOLERANCE
    assert gap(found, published) > 1000 * TOLERANCE


# --- tables ------------------------------------------------------------------------------------------------------------------


def books_of(num_sinks=2, window=3, **settings) -> Books:
    return Books(SinkWindow(num_sinks=num_sinks, window=window, **settings), CPU)


def test_tables_by_hand():
    """Two sinks, a window of three: six slots. Token 6 takes the slot of token 2, and then the sinks are one step nearer."""
    books = books_of()
    for token in range(6):
        step = books.plan(1, None)
        assert step.position_ids.tolist() == [[token]]
    assert books.index.tolist() == [[0, 1, 2, 3, 4, 5]]
    step = books.plan(1, None)
    assert books.index.tolist() == [[0, 1, 6, 3, 4, 5]]
    assert (books.full, books.columns, books.next_position) == (True, 7, 7)
    assert step.turns is not None
    at = 0 if step.at is None else step.at
    assert step.turns.reshape(-1, step.turns.shape[-1])[at].tolist() == [1]
    books.plan(5, None)
    assert books.index.tolist() == [[0, 1, 10, 11, 8, 9]]
    assert books.rebase().tolist() == [8]
    assert books.next_position == 4
    # A sink written at position 0 stands before the window's first token at 0 - 2: it has to be moved there.
    assert books.turns(torch.tensor([[12]])).tolist() == [[[0 - 8 + 7]]]


def test_positions_stay_in_range():
    books = books_of()
    for _ in range(40):
        if books.next_position + 1 > 9:
            books.rebase()
        assert int(books.plan(1, None).position_ids) < 9
    assert books.rebases >= 5
    assert books.highest_position == 8


def test_short_rows_never_stand_before_the_first_position():
    books = books_of()
    valid = torch.zeros(2, 30, dtype=torch.bool)
    valid[0] = True
    valid[1, -1:] = True
    books.spread(2)
    books.plan(30, valid)
    assert books.rebase().tolist() == [26, 0]
    step = books.plan(4, torch.ones(2, 4, dtype=torch.bool))
    assert step.position_ids.tolist() == [[4, 5, 6, 7], [1, 2, 3, 4]]


def test_evicted_by_hand():
    policy = SinkWindow(num_sinks=2, window=3)
    # Query 5 holds 0, 1, 2, 3, 4 and itself; query 6 has lost token 2, query 9 tokens 2 to 5.
    assert policy.evicted(torch.tensor([0, 5, 6, 9])).tolist() == [[0, 0], [0, 0], [1, 1], [4, 4]]
    assert policy.max_held(4) == 4
    assert policy.max_held(400) == policy.num_slots == 6


def test_going_back():
    model, tokens = decoder("llama"), text(30)
    for before in (5, SINKS + WINDOW):
        cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
        expected = one_by_one(model, tokens)
        read(model, tokens[:, :before], cache)
        read(model, text(1, seed=9), cache)  # a draft that is thrown away
        cache.crop(-1)
        assert cache.get_seq_length() == before
        assert gap(one_by_one(model, tokens[:, before:], cache), expected[:, before:]) < TOLERANCE
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    read(model, text(3), cache)
    cache.crop(1)  # a length to keep, as releases before 5.15 had it
    assert cache.get_seq_length() == 1
    cache.crop(0)
    assert cache.get_seq_length() == 1
    cache.crop(-1)
    assert gap(read(model, tokens, cache), expected) < TOLERANCE


def test_going_back_in_a_padded_batch():
    books = books_of()
    books.spread(2)
    books.plan(2, torch.tensor([[True, True], [False, True]]))
    with pytest.raises(ConfigurationError, match="a padded batch cannot be cropped"):
        books.crop(1)


def test_what_is_held_is_the_mask():
    """Evicting is masking: behind every token the slots hold what its row of the rule shows."""
    for policy in (SinkWindow(num_sinks=3, window=4), SinkWindow(num_sinks=0, window=1)):
        cache = PolicyCache(policy, decoder("llama"))
        for token in range(20):
            cache.books.plan(1, None)
            held = sorted(index for index in cache.books.index[0].tolist() if index >= 0)
            assert held == policy.visible(torch.tensor(token), torch.arange(token + 1)).nonzero().flatten().tolist()
            assert len(held) == policy.max_held(token + 1)
