"""Models with layers that write no keys, or keep states beside them: linear attention, feed-forward blocks alone, layers that
share the keys of others, and layers of two halves."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tests.streaming.decoders import (
    MAMBA,
    RECURRENT,
    SHAPE,
    SHARED,
    SINKS,
    TOLERANCE,
    WINDOW,
    assert_as_published,
    assert_dense_before_it_is_full,
    assert_generated_as_dense,
    built,
    gap,
    one_by_one,
    read,
    text,
)

from sinklab.attention.forward_arguments import cache_argument
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.layer import RecurrentLayer, SlotLayer
from sinklab.streaming.reader import open_reader
from sinklab.streaming.state import load_state, save_state
from sinklab.streaming.stream import Stream
from sinklab.streaming.traits import continues_in_chunks


@pytest.mark.parametrize("family", [*RECURRENT, *SHARED])
def test_as_published(family):
    """The layers with keys follow StreamingLLM, whatever the pieces in which a text comes; the others see all of it."""
    model, tokens = built(family), text(40)
    assert_as_published(model)
    with_sinks, without = (SinkCache(model, num_sinks=sinks, window=WINDOW) for sinks in (SINKS, 0))
    assert gap(read(model, tokens, without), read(model, tokens, with_sinks)) > 0.1


@pytest.mark.parametrize("family", [*RECURRENT, *SHARED])
def test_dense_before_it_is_full(family):
    assert_dense_before_it_is_full(built(family))


@pytest.mark.parametrize("family", RECURRENT)
def test_rows_padded_on_the_left_are_the_rows_alone(family):
    model, tokens, pad = built(family), text(40), 7
    padded = tokens.clone()
    padded[1, :pad] = 0
    mask = torch.ones_like(padded)
    mask[1, :pad] = 0
    alone = read(model, tokens[1:, pad:])
    assert gap(read(model, padded, attention_mask=mask)[1:, pad:], alone) < TOLERANCE
    # In pieces, the padding in one of them and then reaching into the next.
    cache, logits = SinkCache(model, num_sinks=SINKS, window=WINDOW), []
    for start, end in ((0, 3), (3, 12), (12, 13), (13, 40)):
        logits.append(read(model, padded[:, start:end], cache, attention_mask=mask[:, :end]))
    assert gap(torch.cat(logits, dim=1)[1:, pad:], alone) < TOLERANCE


@pytest.mark.parametrize("family", ["Qwen3_5", "Gemma3n", "FalconH1"])
def test_generated_as_with_a_cache_of_transformers(family):
    assert_generated_as_dense(built(family))


@pytest.mark.parametrize("family", ["Qwen3_5", "Jamba", "FalconH1"])
def test_a_stream_resumed_from_a_file_and_one_that_was_copied(family, tmp_path):
    model, tokens = built(family), text(60, rows=1)
    whole = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    read(model, tokens[:, :30], whole)
    save_state(whole, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors", model)
    copied = copy.deepcopy(whole)
    expected = one_by_one(model, tokens[:, 30:], whole)
    assert torch.equal(one_by_one(model, tokens[:, 30:], again.cache), expected)
    assert torch.equal(one_by_one(model, tokens[:, 30:], copied), expected)


def test_what_it_holds():
    model = built("Qwen3_5")
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    assert [type(layer) for layer in cache.layers] == [RecurrentLayer] * 3 + [SlotLayer]
    read(model, text(30), cache)
    held = cache.bytes_held()
    states = sum(tensor.nbytes for layer in cache.layers[:3] for tensor in layer.state().values())
    assert states > 0
    assert held == states + cache.layers[3].bytes_held()
    read(model, text(30), cache)
    assert cache.bytes_held() == held  # for any length
    dense = open_reader(model, "full")
    dense.read(text(30))
    assert dense.bytes_held() == states + 2 * 2 * 30 * 2 * 8 * 4  # keys and values, rows, tokens, heads, coordinates, bytes
    cache.reset()
    first = read(model, text(20, rows=3), cache)  # another number of rows
    assert gap(first, read(model, text(20, rows=3))) == 0


def test_a_model_that_begins_anew_in_a_second_chunk_is_read_token_by_token():
    """Jamba forgets its state when several tokens are given at once, in transformers 5.24; the others go on."""
    for family in RECURRENT:
        model, tokens = built(family), text(8, rows=1)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            whole = model(input_ids=tokens).logits
            pieces = [model(input_ids=piece, **cache_argument(model, cache)).logits for piece in tokens.split(4, dim=1)]
        goes_on = gap(torch.cat(pieces, dim=1), whole) < TOLERANCE
        assert continues_in_chunks(model) == goes_on
        assert SinkCache(model, num_sinks=SINKS, window=WINDOW).chunk == (128 if goes_on else 1)


@pytest.mark.parametrize("family", ["Jamba", "Qwen3_5"])
def test_dense_reading_in_pieces_is_reading_at_once(family):
    """Under the policy `full` too, whose cache is one of transformers."""
    model, tokens = built(family), text(20, rows=1)
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
    reader = open_reader(model, "full")
    pieces = [reader.read(piece) for piece in tokens.split([6, 5, 1, 8], dim=1)]
    assert gap(torch.cat(pieces, dim=1), whole) < TOLERANCE
    reader.reset()
    reader.read(tokens[:, :6])
    assert gap(reader.read(tokens[:, 6:], keep=3), whole[:, -3:]) < TOLERANCE


def test_in_integers():
    model, tokens = built("Qwen3_5"), text(40)
    exact = one_by_one(model, tokens, SinkCache(model, num_sinks=SINKS, window=32))
    small = SinkCache(model, num_sinks=SINKS, window=32, quantized="int8")
    assert 0 < gap(one_by_one(model, tokens, small), exact) < 0.1
    assert small.layers[3].values is None  # between the steps there are codes
    both = built("FalconH1")
    exact = one_by_one(both, tokens, SinkCache(both, num_sinks=SINKS, window=32))
    assert 0 < gap(one_by_one(both, tokens, SinkCache(both, num_sinks=SINKS, window=32, quantized="int8")), exact) < 0.5


def test_refused():
    model, tokens = built("Qwen3_5"), text(12)
    with pytest.raises(ConfigurationError, match="takes tokens back, and layers of linear attention of Qwen3_5ForCausalLM"):
        SinkCache(model, num_sinks=SINKS, window=WINDOW, rollback=2)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    read(model, tokens, cache)
    with pytest.raises(ConfigurationError, match="tokens cannot be taken back: layers of linear attention"):
        cache.crop(-1)
    linear = transformers.BambaConfig(**SHAPE, **MAMBA, attn_layer_indices=[])
    with pytest.raises(UnsupportedModelError, match="BambaForCausalLM has no layer of attention: its states have one size"):
        SinkCache(transformers.BambaForCausalLM(linear).eval(), num_sinks=SINKS, window=WINDOW)
    for policy in ({"name": "per_head", "budgets": [[[1, 8], [1, 8]]] * 4},):
        for family, lack in (
            ("Qwen3_5", "layers that write no keys"),
            ("Gemma3n", "layers that write no keys"),
            ("FalconH1", "layers that keep states beside their keys"),
        ):
            with pytest.raises(UnsupportedModelError, match=f"has {lack}, and under policy"):
                open_reader(built(family), policy)


def test_padding_behind_a_token_ends_a_row():
    model, tokens = built("Qwen3_5"), text(12)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0  # on the right, as of a row that has ended
    alone = read(model, tokens[:1])
    assert gap(read(model, tokens, cache, attention_mask=mask)[:1], alone) < TOLERANCE
    more = torch.cat((mask, torch.tensor([[1], [0]])), dim=1)
    read(model, tokens[:, :1], cache, attention_mask=more)
    with pytest.raises(ConfigurationError, match="row 1 has padding between its tokens"):
        read(model, tokens[:, :1], cache, attention_mask=torch.cat((more, torch.ones(2, 1, dtype=torch.long)), dim=1))
    assert not cache._unfinished


def test_streams():
    """The loop gives the tokens of generate(); a row of a batch that ends leaves the others as they are."""
    model, prompt = built("Lfm2"), text(30, rows=1)
    stream = Stream(model, policy={"name": "sink_window", "num_sinks": SINKS, "window": WINDOW}, stop_ids=())
    tokens = [token.id for token in stream.feed(prompt).generate(20)]
    cache = SinkCache(num_sinks=SINKS, window=WINDOW)
    generated = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=[], **cache_argument(model, cache))
    assert generated[0, 30:].tolist() == tokens
