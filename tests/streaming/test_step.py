"""Steps and tables: any cut of a text reads alike, the tables say what is held, and each known mistake would be seen."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, build_decoder, decoder, gap, one_by_one, read, text
from tests.streaming.oracle import slow_logits

from sinklab.errors import ConfigurationError
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies
from sinklab.streaming import host
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.rotation import Rotation
from sinklab.streaming.slot_table import SlotTable
from sinklab.streaming.table import Step

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
    "sinks moved by one too few": (
        SinkWindow,
        "evicted",
        lambda native, self, queries: (native(self, queries) - 1).clamp(min=0),
    ),
    "sinks moved with the first eviction one step late": (
        SinkWindow,
        "evicted",
        lambda native, self, queries: native(self, queries - 1),
    ),
    "a window of one more": (
        SinkWindow,
        "visible",
        lambda native, self, queries, keys: native(self, queries - 1, keys) | (queries == keys),
    ),
    "sinks hidden in a chunk": (host, "_with_sinks", lambda native, query, window, *others: window),
    "sinks hidden in the rule": (
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
    if mistake == "sinks hidden in the rule":  # with sdpa the sinks of a chunk are attended to apart, whatever the rule says
        model.set_attn_implementation("eager")
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
    plan = cache.table.plan

    def off_by_one(length, valid):
        step = plan(length, valid)
        full = cache.table.columns > SINKS + WINDOW + 1
        return dataclasses.replace(step, position_ids=step.position_ids + int(full))

    cache.table.plan = off_by_one
    found = one_by_one(model, tokens, cache)
    assert gap(found[:, : SINKS + WINDOW + 1], published[:, : SINKS + WINDOW + 1]) < TOLERANCE
    assert gap(found, published) > 1000 * TOLERANCE


# --- tables ------------------------------------------------------------------------------------------------------------------


def table_of(num_sinks=2, window=3, **settings) -> SlotTable:
    return SlotTable(SinkWindow(num_sinks=num_sinks, window=window, **settings), CPU)


def test_tables_by_hand():
    """Two sinks, a window of three: six slots. Token 6 takes the slot of token 2, and then the sinks are one step nearer."""
    table = table_of()
    for token in range(6):
        step = table.plan(1, None)
        assert step.position_ids.tolist() == [[token]]
    assert table.index.tolist() == [[0, 1, 2, 3, 4, 5]]
    step = table.plan(1, None)
    assert table.index.tolist() == [[0, 1, 6, 3, 4, 5]]
    assert (table.full, table.columns, table.next_position) == (True, 7, 7)
    assert step.shifts is not None
    at = 0 if step.at is None else step.at
    assert step.shifts.reshape(-1, step.shifts.shape[-1])[at].tolist() == [1]
    table.plan(5, None)
    assert table.index.tolist() == [[0, 1, 10, 11, 8, 9]]
    assert table.rebase().tolist() == [8]
    assert table.next_position == 4
    # A sink written at position 0 stands before the window's first token at 0 - 2: it has to be moved there.
    assert table.shifts(torch.tensor([[12]])).tolist() == [[[0 - 8 + 7]]]


def test_positions_stay_in_range():
    table = table_of()
    for _ in range(40):
        if table.next_position + 1 > 9:
            table.rebase()
        assert int(table.plan(1, None).position_ids) < 9
    assert table.rebases >= 5
    assert table.highest_position == 8


def test_short_rows_never_stand_before_the_first_position():
    table = table_of()
    valid = torch.zeros(2, 30, dtype=torch.bool)
    valid[0] = True
    valid[1, -1:] = True
    table.spread(2)
    table.plan(30, valid)
    assert table.rebase().tolist() == [26, 0]
    step = table.plan(4, torch.ones(2, 4, dtype=torch.bool))
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
    table = table_of()
    table.spread(2)
    table.plan(2, torch.tensor([[True, True], [False, True]]))
    with pytest.raises(ConfigurationError, match="a padded batch cannot be cropped"):
        table.crop(1)


def test_what_is_held_is_the_mask():
    """Evicting is masking: behind every token the slots hold what its row of the rule shows."""
    for policy in (SinkWindow(num_sinks=3, window=4), SinkWindow(num_sinks=0, window=1)):
        cache = PolicyCache(policy, decoder("llama"))
        for token in range(20):
            cache.table.plan(1, None)
            held = sorted(index for index in cache.table.index[0].tolist() if index >= 0)
            assert held == policy.visible(torch.tensor(token), torch.arange(token + 1)).nonzero().flatten().tolist()
            assert len(held) == policy.max_held(token + 1)


# --- every rule of slots -----------------------------------------------------------------------------------------------------

POLICIES = [
    {"name": "sink_window", "num_sinks": 2, "window": 9, "positions": "original"},
    {"name": "window", "window": 9},
    {"name": "pinned", "pinned": (0, 7, 30), "window": 9},
    {"name": "pinned", "pinned": (0, 7, 30), "window": 9, "positions": "original"},
    {"name": "pinned", "pinned": (5,), "window": 3},
    {"name": "strided", "num_sinks": 2, "stride": 2, "dense": 4, "span": 16},
    {"name": "blocks", "num_sinks": 2, "block": 5, "blocks": 2},
    {"name": "blocks", "num_sinks": 0, "block": 4, "blocks": 3, "positions": "original"},
]


@torch.no_grad()
def encoded_anew(model, policy, tokens):
    """Logits of a model of one layer, whose keys depend on token and position alone: a dense reading of what is held, side by
    side or where it stood."""
    found = []
    for last in range(tokens.shape[1]):
        held = policy.visible(torch.tensor(last), torch.arange(last + 1)).nonzero().flatten()
        positions = None if policy.positions == "in_cache" else held[None]
        # Without a mask, transformers takes gaps in the positions for the ends of documents.
        causal = torch.ones(len(held), len(held), dtype=torch.bool).tril().expand(len(tokens), 1, -1, -1)
        logits = model(input_ids=tokens[:, held], position_ids=positions, attention_mask=causal, use_cache=False).logits
        found.append(logits[:, -1:])
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("settings", POLICIES, ids=str)
def test_every_slot_policy(settings):
    """Cut in any way, counted anew often or never, in rows of their own lengths."""
    policy = policies.make(settings)
    model, tokens = build_decoder("llama", num_hidden_layers=1), text(80)
    expected = encoded_anew(model, policy, tokens)
    for chunk in (1, 7, 64):
        for rebase_at in (None, policy.reach + chunk + 3):
            cache = PolicyCache(policy, model, chunk=chunk, rebase_at=rebase_at)
            assert gap(read(model, tokens, cache, pieces=[41, 1, 1, 37]), expected) < TOLERANCE
    cache = PolicyCache(policy, model, chunk=6, rebase_at=policy.reach + 8)
    shorter = torch.ones(2, 80, dtype=torch.bool)
    shorter[1, :33] = shorter[1, 60:63] = False
    found = read_masked(model, tokens, shorter, cache, [50, 1, 1, 28])
    for row in range(2):
        alone = tokens[row, shorter[row]][None]
        assert gap(found[row, shorter[row]], encoded_anew(model, policy, alone)[0]) < TOLERANCE


@torch.no_grad()
def read_masked(model, tokens, mask, cache, pieces):
    both = zip(tokens.split(pieces, dim=1), mask.long().split(pieces, dim=1), strict=True)
    logits = [
        model(input_ids=piece, attention_mask=shown, past_key_values=cache, use_cache=True).logits for piece, shown in both
    ]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("moved", [1, 4], ids=["pinned-keys-alike", "each-by-its-own"])
def test_pinned_keys_are_rotated_by_their_own_steps(rows, copies, moved):
    # Heads and rows of the batch share products; each key is to come out as if it were moved alone.
    batch, heads, pinned, size = 2, 3, 4, 6
    index = torch.arange(size // 2)
    rotation = Rotation(torch.tensor([1.0, 0.3, 0.02], dtype=torch.float64), index, index + size // 2, size)
    shifts = torch.randint(-50, 50, (rows, copies, moved))
    step = Step(copies, None, 0, shifts, None, None, 0, torch.zeros(rows, copies, dtype=torch.long))
    layer = SlotLayer.__new__(SlotLayer)
    layer.rotation = rotation
    masters = torch.randn(batch, heads, pinned, size, dtype=torch.float64)
    rotated = layer._rotated(step, masters)
    assert rotated.shape == (batch, heads, copies, pinned, size)
    steps = shifts[:, None].expand(batch, heads, copies, pinned)
    expected = rotation.rotated(masters[:, :, None].expand(-1, -1, copies, -1, -1), steps)
    assert torch.allclose(rotated, expected, atol=1e-12)
