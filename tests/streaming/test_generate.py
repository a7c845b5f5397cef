"""generate() through a bounded cache says what a slow reading of the whole text says: greedy, beams, sampling, turns."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tests.streaming.decoders import SINKS, WINDOW, backends_of, build_decoder, decoder, gap, one_by_one, read, text
from tests.streaming.oracle import slow_logits

from sinklab.errors import ConfigurationError
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.reader import open_reader

NEW = 15
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
PROMPTS = (5, SINKS + WINDOW, 20)
"""Shorter than the cache, just as long, longer."""


def small(model=None, **settings) -> SinkCache:
    return SinkCache(model, num_sinks=SINKS, window=WINDOW, **settings)


def is_greedy(model, found, new=NEW):
    """Whether each of the new tokens is what the slow oracle, given those before it, says most probably."""
    said = slow_logits(model, found[:, :-1], SINKS, WINDOW)[:, -new:].argmax(dim=-1)
    return bool((said == found[:, -new:]).all())


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), torch.nn.DataParallel])
def test_a_cache_of_a_wrapped_model_is_of_the_model_inside(wrap):
    """Before, the wrapper was refused for taking no position_ids, or had no config."""
    model = decoder("llama")
    cache = small(wrap(model))
    assert cache.model is model
    assert is_greedy(model, model.generate(text(5), past_key_values=cache, **GREEDY))


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "cohere2", "gptj", "gpt_oss"])
def test_greedy(family, length):
    model, tokens = decoder(family, backends_of(family)[-1]), text(length)
    found = []
    # The first cache finds its model by itself.
    for cache in (small(), small(model), small(model, chunk=4), small(model, chunk=4, rebase_at=SINKS + WINDOW + 5)):
        found.append(model.generate(tokens, past_key_values=cache, **GREEDY))
        assert cache.model is model
        assert cache.get_seq_length() == length + NEW - 1  # the last token is not read
    assert is_greedy(model, found[0])
    assert all((other == found[0]).all() for other in found)


def test_prefill_in_chunks_of_the_host():
    model, tokens = decoder("llama"), text(20)
    found = model.generate(tokens, past_key_values=small(), prefill_chunk_size=6, **GREEDY)
    assert is_greedy(model, found)


def test_from_embeddings():
    model, tokens = decoder("llama"), text(20)
    embedded = model.get_input_embeddings()(tokens).detach()
    found = model.generate(inputs_embeds=embedded, past_key_values=small(model, chunk=7), **GREEDY)
    assert is_greedy(model, torch.cat((tokens, found), dim=1))


@pytest.mark.parametrize("extra", [{}, {"num_return_sequences": 3}, {"length_penalty": 2.0, "early_stopping": True}])
@pytest.mark.parametrize("length", PROMPTS)
def test_beams(length, extra):
    """Beam search re-encodes nothing: a cache that holds everything gives the dense beams, and a small one those of a model
    that has no cache and reads every beam anew under the policy."""
    model, tokens = decoder("llama"), text(length)
    settings = {**GREEDY, "num_beams": 3, **extra}
    dense = model.generate(tokens, **settings)
    wide = model.generate(tokens, past_key_values=SinkCache(model, num_sinks=SINKS, window=60), **settings)
    assert (wide == dense).all()
    found = model.generate(tokens, past_key_values=small(), **settings, output_scores=True, return_dict_in_generate=True)
    anew = read(model, found.sequences, small(model)).log_softmax(-1)[:, length - 1 : -1]
    said = anew.gather(2, found.sequences[:, length:, None])[..., 0].sum(1)
    # The score of a beam is the sum of its log probabilities over the length to the power of the penalty.
    expected = said / NEW ** extra.get("length_penalty", 1.0)
    assert gap(found.sequences_scores, expected) < 1e-4


def test_sampling_several_sequences():
    model, tokens = decoder("llama"), text(8)
    settings = {**GREEDY, "do_sample": True, "num_return_sequences": 3}
    found = []
    for cache in (None, SinkCache(num_sinks=SINKS, window=60)):
        torch.manual_seed(0)
        found.append(model.generate(tokens, past_key_values=cache, **settings))
    assert found[0].shape == (6, 8 + NEW)
    assert (found[0] == found[1]).all()
    torch.manual_seed(0)
    narrow = model.generate(tokens, past_key_values=small(), **settings)
    assert not (narrow == found[0]).all()  # or the window would not matter


def test_turns_of_a_talk():
    """One cache through several calls of generate(): only what is new is read."""
    model, cache, said = decoder("llama"), small(), text(6)
    for turn in range(3):
        said = torch.cat((said, text(4 + turn, seed=turn)), dim=1)
        said = model.generate(said, past_key_values=cache, **{**GREEDY, "max_new_tokens": 6})
        assert is_greedy(model, said, 6)
    cache.reset()
    assert cache.get_seq_length() == 0
    one = text(9, rows=1, seed=5)
    assert is_greedy(model, model.generate(one, past_key_values=cache, **GREEDY))  # another batch size too


def test_a_prompt_read_once_and_copied():
    """The recipe of transformers for a prompt that many texts share."""
    model, prompt, cache = decoder("llama"), text(17, rows=1), small(decoder("llama"))
    read(model, prompt, cache)
    for seed in (1, 2):
        tokens = torch.cat((prompt, text(5, rows=1, seed=seed)), dim=1)
        found = model.generate(tokens, past_key_values=copy.deepcopy(cache), **GREEDY)
        assert is_greedy(model, found)
    assert cache.get_seq_length() == 17


def test_copies_go_on_when_the_first_cache_is_gone():
    model, prompt = decoder("llama"), text(17, rows=1)
    for policy in (
        {"name": "sink_window", "num_sinks": SINKS, "window": WINDOW},
        {"name": "strided", "num_sinks": 1, "dense": 4, "span": 12, "stride": 2},
    ):
        reader = open_reader(model, policy)
        reader.read(prompt)
        expected = reader.read(text(5, rows=1, seed=1))
        cache = open_reader(model, policy).cache
        read(model, prompt, cache)
        copied, gone = copy.deepcopy(cache), weakref.ref(cache)
        del cache, reader
        gc.collect()
        assert gone() is None
        assert gap(read(model, text(5, rows=1, seed=1), copied), expected) == 0


def test_a_copy_of_a_cache_is_of_the_same_model():
    model, prompt = build_decoder("llama"), text(17, rows=1)
    cache = small(model)
    expected, more = read(model, prompt, cache), text(5, rows=1, seed=1)
    for both in ((model, cache), (cache, model)):  # also when the model is copied by the same call
        (twin,) = (made for made in copy.deepcopy(both) if isinstance(made, type(model)))
        (copied,) = (made for made in copy.deepcopy(both) if isinstance(made, SinkCache))
        assert copied.model is model
        with pytest.raises(ConfigurationError, match="this cache belongs to another model"):
            read(twin, more, copied)
        assert gap(read(twin, prompt, small(twin)), expected) == 0
    first, second = copy.deepcopy([cache, cache])
    assert first is second
    assert gap(read(model, more, first), read(model, more, cache)) == 0


def test_a_cache_cannot_be_pickled():
    cache = small(decoder("llama"))
    with pytest.raises(ConfigurationError, match=r"cannot be pickled; save_state of sinklab\.streaming\.state writes"):
        pickle.dumps(cache)
    assert pickle.loads(pickle.dumps(small())).policy == cache.policy  # of no model yet


@torch.no_grad()
def test_rows_reordered_repeated_and_left_out():
    model, tokens = decoder("llama"), text(30, rows=3)
    expected = one_by_one(model, tokens)
    cache = small(model)
    read(model, tokens[:, :20], cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    rows = torch.tensor([2, 0, 1])
    assert gap(read(model, tokens[rows, 20:22], cache), expected[rows, 20:22]) < 1e-4
    cache.batch_repeat_interleave(2)
    rows = rows.repeat_interleave(2)
    assert gap(read(model, tokens[rows, 22:25], cache), expected[rows, 22:25]) < 1e-4
    cache.batch_select_indices(torch.tensor([5, 0]))
    rows = rows[[5, 0]]
    assert gap(read(model, tokens[rows, 25:], cache, pieces=[1, 4]), expected[rows, 25:]) < 1e-4


def test_repeated_before_it_has_read_anything():
    cache = small(decoder("llama"))
    cache.batch_repeat_interleave(3)
    tokens = text(5, rows=3)
    assert gap(read(decoder("llama"), tokens, cache), one_by_one(decoder("llama"), tokens)) < 1e-4
