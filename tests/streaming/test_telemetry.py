"""What a cache says of itself, against tables and figures worked out by hand."""

import dataclasses

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab import PolicyCache, SinkCache
from sinklab.policies.pinned import Pinned
from sinklab.streaming.base import Telemetry
from sinklab.streaming.reader import open_reader


@pytest.fixture(scope="module")
def model():
    return make_sinklm()


def read(model, cache, ids, mask=None):
    with torch.no_grad():
        model(input_ids=torch.tensor(ids), attention_mask=mask, past_key_values=cache, use_cache=True)
    return cache


def table(cache, *columns, row=0):
    found = cache.describe()
    found = found[found["row"] == row]
    return [
        tuple(None if value is None else int(value) for value in line)
        for line in zip(*(none(found[c]) for c in columns), strict=True)
    ]


def none(column):
    return [None if missing else value for value, missing in zip(column, column.isna(), strict=True)]


COLUMNS = ("slot", "token", "id", "pinned", "position", "distance")


class TestDescribe:
    def test_before_anything_leaves(self, model):
        cache = read(model, SinkCache(model, num_sinks=2, window=3), [[10, 11, 12]])
        assert table(cache, *COLUMNS) == [(0, 0, 10, 1, 0, 3), (1, 1, 11, 1, 1, 2), (2, 2, 12, 0, 2, 1)]

    # Two sinks, a window of three, tokens 0 to 6: the ring of four slots holds 6 3 4 5. The next token, 7, is written over 3
    # and sees 4, 5, 6 at distances 3, 2, 1; tokens 2 and 3 are gone for it, so the sinks stand two steps nearer than in the
    # text.
    HELD = [(0, 0, 10, 1, 2, 5), (1, 1, 11, 1, 3, 4), (2, 6, 16, 0, 6, 1), (3, 3, 13, 0, None, None)]
    HELD += [(4, 4, 14, 0, 4, 3), (5, 5, 15, 0, 5, 2)]

    @pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 4], [2, 1, 4]])
    def test_after_two_have_left(self, model, pieces):
        cache, ids = SinkCache(model, num_sinks=2, window=3), torch.arange(10, 17)
        for piece in ids.split(pieces):
            read(model, cache, [piece.tolist()])
        assert table(cache, *COLUMNS) == self.HELD

    def test_original_positions(self, model):
        cache = read(model, SinkCache(model, num_sinks=2, window=3, positions="original"), [list(range(10, 17))])
        expected = [(0, 0, 7), (1, 1, 6), (6, 6, 1), (3, None, None), (4, 4, 3), (5, 5, 2)]
        assert table(cache, "token", "position", "distance") == expected

    def test_after_a_rebase(self, model):
        """Positions below 8 only: token 8 would have 8, so positions are counted from token 4, the oldest in the ring."""
        cache = SinkCache(model, num_sinks=2, window=3, rebase_at=8, chunk=1)
        for token in range(9):
            read(model, cache, [[10 + token]])
        # The next token, 9, has position 5. It sees 6, 7, 8; sinks right before them.
        expected = [(0, 0, 5), (1, 1, 4), (6, 2, 3), (7, 3, 2), (8, 4, 1), (5, None, None)]
        assert table(cache, "token", "position", "distance") == expected
        assert cache.telemetry().rebases == 1
        assert cache.telemetry().highest_position == 7

    def test_tokens_pinned_elsewhere(self, model):
        cache = read(model, PolicyCache(Pinned(pinned=(1, 5), window=2), model), [list(range(10, 19))])
        # Not pinned: 0 2 3 4 6 7 8; the ring of three holds 6 7 8, and token 9 sees 7 and 8. Between 5 and 9 token 6 is gone;
        # between 1 and 9 tokens 2 3 4 6 are.
        expected = [(1, 1, 5, 4), (5, 1, 6, 3), (6, 0, None, None), (7, 0, 7, 2), (8, 0, 8, 1)]
        assert sorted(table(cache, "token", "pinned", "position", "distance")) == expected

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_rows_with_padding(self, model, side):
        pads = [0, 0, 0]
        short = [20, 21, 22, 23]
        mask = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 0, 0, 0]])
        rows = [list(range(10, 17)), pads + short if side == "left" else short + pads]
        cache = read(model, SinkCache(model, num_sinks=2, window=3), rows, mask)
        assert table(cache, *COLUMNS, row=0) == self.HELD
        expected = [(0, 0, 20, 1, 0, 4), (1, 1, 21, 1, 1, 3), (2, 2, 22, 0, 2, 2), (3, 3, 23, 0, 3, 1)]
        assert table(cache, *COLUMNS, row=1) == expected
        assert cache.telemetry().seen == (7, 4)
        assert cache.telemetry().held == (6, 4)
        assert cache.telemetry().evicted == (1, 0)

    def test_embeddings_have_no_ids(self, model):
        cache = SinkCache(model, num_sinks=1, window=2)
        with torch.no_grad():
            model(inputs_embeds=model.embed_tokens(torch.tensor([[10, 11]])), past_key_values=cache, use_cache=True)
        assert table(cache, "token", "id") == [(0, None), (1, None)]

    def test_text(self, model, tokenizer):
        ids = tokenizer("def")["input_ids"]
        held = read(model, SinkCache(model, num_sinks=1, window=9), [ids]).describe(tokenizer)
        assert held["text"].tolist() == ["<bos>", *(tokenizer.decode([token]) for token in ids[1:])]
        types = {"text": "string", "pinned": "bool", **dict.fromkeys(("id", "position", "distance"), "Int64")}
        assert held.dtypes.astype(str).to_dict() == dict.fromkeys(("row", "slot", "token"), "int64") | types


class TestFigures:
    def test_of_a_cache(self, model):
        cache = read(model, SinkCache(model, num_sinks=2, window=3), [list(range(10, 20))])
        found = cache.telemetry()
        # 2 layers × 2 heads × (6 slots, keys and values, and 2 masters) × 16 coordinates × 4 bytes.
        expected = Telemetry(
            policy="2+3", seen=(10,), held=(6,), capacity=6, bytes=2 * 2 * (12 + 2) * 16 * 4, rebases=0, highest_position=9
        )
        assert found == expected
        assert found.evicted == (4,)
        assert str(found) == ("2+3: 6 of 6 tokens held in 3.5 KiB, 10 seen, 4 evicted, highest position 9, 0 re-bases")
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.bytes = 0

    def test_positions_never_pass_their_limit(self, model):
        cache = SinkCache(model, num_sinks=2, window=3, rebase_at=20, chunk=5)
        for _ in range(60):
            read(model, cache, [[10]])
        found = cache.telemetry()
        assert found.highest_position == 19
        # Counted anew as soon as position 20 would come, from the oldest of the four in the ring: 16 further each time.
        assert found.rebases == 3

    def test_of_a_reader_that_evicts_nothing(self, model):
        reader = open_reader(model, "full")
        reader.read(torch.arange(10, 20)[None])
        found = reader.telemetry()
        assert (found.seen, found.held, found.capacity, found.evicted) == ((10,), (10,), None, (0,))
        assert found.bytes == reader.bytes_held() == 2 * 2 * 2 * 10 * 16 * 4
        assert str(found) == "full: 10 tokens held in 5.0 KiB, 10 seen, 0 evicted, 0 re-bases"
