"""Steps and tables: any cut of a text reads alike, the tables say what is held, and each known mistake would be seen."""

import dataclasses

import hypothesis
import pytest
import torch
import transformers
from hypothesis import strategies
from tests.streaming.decoders import (
    SINKS,
    TOLERANCE,
    WINDOW,
    Gapped,
    build_decoder,
    decoder,
    encoded_anew,
    gap,
    one_by_one,
    read,
    sharpened,
    slow_logits,
    text,
)

from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies
from sinklab.sinks import Sink, Sinks
from sinklab.streaming import host
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.table import SlotTable
from sinklab.streaming.traits import read_rotations

LENGTH = 50
CPU = torch.device("cpu")


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    pieces=strategies.lists(strategies.integers(1, 20), min_size=1, max_size=7),
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
    "sinks stay where they were": ("evicted", lambda native, self, queries: native(self, queries) * 0),
    "sinks moved by one too few": ("evicted", lambda native, self, queries: (native(self, queries) - 1).clamp(min=0)),
    "sinks moved with the first eviction one step late": ("evicted", lambda native, self, queries: native(self, queries - 1)),
    "a window of one more": (
        "visible", lambda native, self, queries, keys: native(self, queries - 1, keys) | (queries == keys)
    ),
    "sinks hidden in a chunk": ("_with_sinks", lambda native, query, window, *others: window),
    "sinks hidden in the rule": (
        "visible", lambda native, self, queries, keys: (queries - keys >= 0) & (queries - keys <= self.window)
    ),
    "a chunk that looks ahead": ("visible", lambda native, self, queries, keys: native(self, queries + 1, keys)),
    "keys in the wrong slot": ("slots", lambda native, self, tokens: native(self, tokens + (tokens >= 2 * self.window))),
    "keys moved the wrong way": ("move", lambda native, self, steps: native(self, -steps)),
    "keys not moved": ("move", lambda native, self, steps: None),
}  # fmt: skip
"""What sink caches have got wrong, as changes of one method: new keys one position off once the window is full, as transformers
had it; window masks that hide the sinks inside a chunk; eviction one step late."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake, monkeypatch):
    """On these models, with these texts, a mistake moves logits a thousand times as far as the tolerance."""
    # With sdpa the sinks of a chunk are attended to apart, whatever the rule says.
    model, tokens = decoder("llama", "eager" if mistake == "sinks hidden in the rule" else "sdpa"), text(LENGTH)
    published = slow_logits(model, tokens, SINKS, WINDOW)

    def distance():
        tight = {"num_sinks": SINKS, "window": WINDOW, "rebase_at": 30}
        single = one_by_one(model, tokens, SinkCache(model, chunk=1, **tight))
        return max(gap(single, published), gap(read(model, tokens, SinkCache(model, chunk=6, **tight)), published))

    assert distance() < TOLERANCE
    name, wrong = MISTAKES[mistake]
    owner = {"_with_sinks": host, "move": SlotLayer}.get(name, SinkWindow)
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


def test_going_back_to_a_length():
    """As releases before 5.15 asked for it."""
    model, tokens, cache = decoder("llama"), text(30), SinkCache(num_sinks=SINKS, window=WINDOW)
    cache.bind(model)
    read(model, text(3), cache)
    for length in (1, 0):
        cache.crop(length)
        assert cache.get_seq_length() == 1
    cache.crop(-1)
    assert gap(read(model, tokens, cache), one_by_one(model, tokens)) < TOLERANCE


def test_going_back_in_a_padded_batch():
    table = table_of()
    table.spread(2)
    table.plan(2, torch.tensor([[True, True], [False, True]]))
    with pytest.raises(ConfigurationError, match="a padded batch cannot be cropped"):
        table.crop(1)


# --- every rule of slots -----------------------------------------------------------------------------------------------------

POLICIES = [
    {"name": "sink_window", "num_sinks": 2, "window": 9, "positions": "original"},
    {"name": "window", "window": 9},
    {"name": "pinned", "pinned": (0, 7, 30), "window": 9},
    {"name": "pinned", "pinned": (0, 7, 30), "window": 9, "positions": "original"},
    {"name": "pinned", "pinned": (5,), "window": 3},
    Gapped(),
    {"name": "blocks", "num_sinks": 2, "block": 5, "blocks": 2},
    {"name": "blocks", "num_sinks": 0, "block": 4, "blocks": 3, "positions": "original"},
]


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


@pytest.fixture(scope="module")
def model():
    return sharpened()


def read_padded(model, padding, **settings):
    """Logits of 12 tokens at once and 60 one by one, the real ones of every row."""
    length = 72
    tokens = torch.randint(4, 32, (len(padding), length), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    cache = SinkCache(model, num_sinks=3, window=10, **settings)
    with torch.no_grad():
        logits = [model(tokens[:, :12], attention_mask=mask[:, :12].long(), past_key_values=cache).logits]
        for stop in range(13, length + 1):
            part = tokens[:, stop - 1 : stop]
            logits.append(model(part, attention_mask=mask[:, :stop].long(), past_key_values=cache).logits)
    return torch.cat(logits, dim=1)[mask], cache


@pytest.mark.parametrize("padding", [(0, 0), (0, 5, 11), (7,)])
@pytest.mark.parametrize("settings", [{}, {"rebase_at": 31, "chunk": 12}, {"positions": "original"}])
def test_as_in_chunks(model, monkeypatch, padding, settings):
    found, cache = read_padded(model, padding, **settings)
    planned = []

    def chunk(self):
        planned.append(self.rows)
        return self._plan_chunk(1, torch.ones(self.rows, 1, dtype=torch.bool))

    for name in ("_plan_next", "_plan_token"):
        monkeypatch.setattr(SlotTable, name, chunk)
    expected, other = read_padded(model, padding, **settings)
    assert len(planned) == 60
    # The same keys in another order, summed in float32; other positions move logits by 0.1.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for name in SlotTable.per_row:
        assert torch.equal(getattr(cache.table, name), getattr(other.table, name))


def test_found_sinks_are_pinned_where_they_were_found(model):
    """What is held is what Pinned holds; sinks without a position, and two answers to one question, are refused."""
    found = Sinks(sinks=tuple(Sinks.at(position).main for position in (5, 2)))
    tokens = torch.randint(4, 32, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = SinkCache(model, sinks=found, window=10)
    other = PolicyCache(Pinned(pinned=(2, 5), window=10), model)
    with torch.no_grad():
        assert torch.equal(model(tokens, past_key_values=cache).logits, model(tokens, past_key_values=other).logits)
    assert set(cache.table.index[0].tolist()) == {2, 5, *range(29, 40)}
    token = Sinks.at(Sink(kind="token", token=7, text="."))
    for sinks, why in ((token, "the first “.”, which has no position"), (Sinks.at("null"), "sees it"), (Sinks(), "nowhere")):
        with pytest.raises(ConfigurationError, match=why):
            SinkCache(model, sinks=sinks)
    with pytest.raises(ConfigurationError, match="`num_sinks` and `sinks` both say which tokens stay"):
        SinkCache(model, sinks=found, num_sinks=4)


ELSEWHERE = torch.device("meta")
PIECES = (5, 1, 1, 12, *[1] * 40, 7)


@pytest.mark.parametrize(
    "policy", [SinkWindow(num_sinks=SINKS, window=WINDOW), Pinned(pinned=(0, 7), window=WINDOW)], ids=lambda policy: policy.name
)
def test_keys_stay_where_their_layer_is(policy):
    """Steps are planned on the CPU; operations on tensors of both devices fail."""
    rotation = read_rotations(decoder("llama")).layers[0]
    table = SlotTable(policy, torch.device("cpu"))
    here, there = SlotLayer(table, rotation), SlotLayer(table, rotation)
    for rows in (1, 3):
        table.clear()
        here.release()
        there.release()
        for length in PIECES:
            valid = None if rows == 1 else torch.ones(rows, length, dtype=torch.bool)
            if rows > 1:
                table.spread(rows)
            table.step = table.plan(length, valid)
            keys = torch.randn(rows, 2, length, 8)
            found = here.update(keys, keys)
            moved = there.update(keys.to(ELSEWHERE), keys.to(ELSEWHERE))
            assert [tensor.device for tensor in moved] == [ELSEWHERE] * 2
            assert [tensor.shape for tensor in moved] == [tensor.shape for tensor in found]
            table.step = None
        assert table.full


def test_the_same_matrices_elsewhere():
    """Those of steps that are planned ahead share one tensor and take their part of it; a copy takes that part."""
    rotation = read_rotations(decoder("llama")).layers[0]
    table = SlotTable(SinkWindow(num_sinks=SINKS, window=WINDOW), torch.device("cpu"))
    for _ in range(30):
        step = table.step = table.plan(1, None)
        if step.shifts is not None:
            copy = step.on(torch.device("cpu"))
            assert torch.equal(copy.rotation_matrices(rotation, torch.float32), step.rotation_matrices(rotation, torch.float32))
            assert torch.equal(copy.rotation_matrices(rotation, torch.float32), step.rotation_matrices(rotation, torch.float32))
        assert table.step_at(torch.device("cpu")) is step
        assert table.step_at(ELSEWHERE) is table.step_at(ELSEWHERE)
    assert step.shifts is not None


LONG, EXPERTS = 60, {"num_experts_per_tok": 2}


@torch.no_grad()
@pytest.mark.parametrize("quantized", [None, "int8"])
def test_as_one_by_one(quantized, monkeypatch):
    model, tokens, seen = decoder("llama"), text(LONG), []
    original = host._with_sinks

    def noted(query, window, total, keys, values, scaling):
        seen.append((query.shape[2], keys.shape[2:4]))
        return original(query, window, total, keys, values, scaling)

    monkeypatch.setattr(host, "_with_sinks", noted)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=24, quantized=quantized)
    found = torch.cat([read(model, part, cache) for part in tokens.split([SINKS + 1, 30, LONG - SINKS - 31], dim=1)], dim=1)
    # The first piece has the sinks among its queries; the others are served, a call a layer, with no copy of a sink too many.
    layers = model.config.num_hidden_layers
    chunks = [24, 6, *([24] * ((LONG - SINKS - 31) // 24)), (LONG - SINKS - 31) % 24]
    chunks = [size for size in chunks if size > 1]
    assert seen == [(size, (size, SINKS)) for size in chunks for _ in range(layers)]
    if quantized is None:
        assert gap(found, one_by_one(model, tokens)) < TOLERANCE
    else:  # integers round by more than the order of sums: as with copies of the sinks
        other = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=24, quantized=quantized)
        other._apart = None
        pieces = tokens.split([SINKS + 1, 30, LONG - SINKS - 31], dim=1)
        assert gap(found, torch.cat([read(model, part, other) for part in pieces], dim=1)) < 0.1


@torch.no_grad()
def test_under_an_observer_sinks_are_copied():
    """Somebody who looks at the attention of a chunk sees its sinks."""
    model, tokens = decoder("llama"), text(LONG)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    with attend(model):
        found = read(model, tokens, cache)
    assert gap(found, one_by_one(model, tokens)) < TOLERANCE


def made(name, **fields):
    """A small model of a family that is in no zoo."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_key_value_heads=2, max_position_embeddings=64, head_dim=8, bos_token_id=1, eos_token_id=2, **fields
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "fits", "fields"),
    [
        ("Llama", True, {}),
        ("Afmoe", True, {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "sliding_window": SINKS + WINDOW + 1}),
        # It has a named mask; the others attend twice, have a mask of their own, and repeat keys in an order of their own.
        ("DiffLlama", False, {}),
        ("Doge", False, {}),
        ("JetMoe", False, {**EXPERTS, "num_local_experts": 4, "kv_channels": 8}),
    ],
)
def test_models_whose_attention_is_given_something_else_have_copies(name, fits, fields):
    model = made(name, **fields)
    tokens, cache = text(LONG), SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=8)
    assert gap(read(model, tokens, cache), one_by_one(model, tokens)) < TOLERANCE
    assert host._fits[model] == fits
    assert cache.table.given is None
    wide = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=24)  # another cache of the model need not find out
    assert gap(read(model, tokens, wide), one_by_one(model, tokens)) < TOLERANCE
