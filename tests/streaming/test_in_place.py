"""Single tokens are written in place, some worked out ahead, rows of a padded batch each in a slot of its own: as in chunks."""

from __future__ import annotations

import pytest
import torch
from tests.architectures.zoo import ZOO, build

from sinklab.errors import ConfigurationError
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.sinks import Sink, Sinks
from sinklab.streaming import slot_table
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.slot_table import SlotTable


@pytest.fixture(scope="module")
def model():
    model = build(ZOO["llama"], "sdpa").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(3)
    return model


def read(model, padding, **settings):
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
    found, cache = read(model, padding, **settings)
    planned = []

    def chunk(self):
        planned.append(self.rows)
        return self._plan_chunk(1, torch.ones(self.rows, 1, dtype=torch.bool))

    for name in ("_plan_next", "_plan_token"):
        monkeypatch.setattr(SlotTable, name, chunk)
    expected, other = read(model, padding, **settings)
    assert len(planned) == 60
    # The same keys in another order, summed in float32; other positions move logits by 0.1.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for name in SlotTable.per_row:
        assert torch.equal(getattr(cache.table, name), getattr(other.table, name))


def test_what_is_worked_out_ahead_is_what_is_worked_out_one_by_one(monkeypatch):
    policy = SinkWindow(num_sinks=2, window=5)
    ahead, single = SlotTable(policy, torch.device("cpu")), SlotTable(policy, torch.device("cpu"))
    for number in range(200):
        if number in (50, 111):  # inside and at the end of what was worked out
            assert torch.equal(torch.as_tensor(ahead.rebase()), torch.as_tensor(single.rebase()))
        mine = ahead.plan(1, None)
        theirs = single._plan_token()
        assert (mine.slot, mine.filled, mine.visible) == (theirs.slot, theirs.filled, theirs.visible)
        assert torch.equal(mine.position_ids, theirs.position_ids)
        assert (mine.shifts is None) == (theirs.shifts is None)
        if mine.shifts is not None:
            shifts = mine.shifts if mine.at is None else mine.shifts[mine.at : mine.at + 1]
            assert torch.equal(shifts, theirs.shifts)
        assert all(torch.equal(getattr(ahead, name), getattr(single, name)) for name in SlotTable.per_row)


def test_beginning_anew_drops_what_was_worked_out(model):
    tokens = torch.randint(4, 32, (1, 2 * slot_table._AHEAD), generator=torch.Generator().manual_seed(0))
    cache = PolicyCache(SinkWindow(num_sinks=3, window=10), model)

    def read_singly():
        cache.reset()
        return torch.cat([model(token, past_key_values=cache).logits for token in tokens.split(1, dim=1)], dim=1)

    with torch.no_grad():
        assert torch.equal(read_singly(), read_singly())


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
