"""The life of a bounded cache: interrupted, interleaved, copied, cast, dropped; and rounding that does not add up."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
import transformers
from tests.conftest import make_sinklm
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, build_decoder, decoder, gap, one_by_one, read, text
from tests.streaming.oracle import slow_logits
from tests.streaming.test_in_front import KINDS
from tests.streaming.test_in_front import build as build_in_front

from sinklab.errors import ConfigurationError
from sinklab.policies.per_head import PerHead
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming import slot_table
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.per_head import PerHeadCache
from sinklab.streaming.reader import open_reader


def small(model=None, **settings) -> SinkCache:
    return SinkCache(model, num_sinks=SINKS, window=WINDOW, **settings)


# --- forwards that do not end ------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 3, 20])
def test_an_interrupted_forward(length):
    """Some layers have written the tokens and others have not: the cache says so until it is reset."""
    model, tokens = build_decoder("llama"), text(40)
    cache, other = small(model, chunk=8), small(model)
    expected = one_by_one(model, tokens, other)
    read(model, tokens[:, :14], cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        read(model, tokens[:, 14 : 14 + length], cache)
    hook.remove()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"with this cache was interrupted: some of its layers hold.*reset\(\) it"):
            read(model, tokens[:, 14:], cache)
    cache.reset()
    assert gap(read(model, tokens, cache), expected) < TOLERANCE
    assert gap(read(model, tokens, other), expected) > 1  # another cache of the model is not concerned: it has gone on


@torch.no_grad()
def test_a_refused_forward_changes_nothing():
    model, tokens, cache = decoder("llama"), text(40), small(decoder("llama"))
    expected = one_by_one(model, tokens)
    read(model, tokens[:, :20], cache)
    for wrong in (
        {"input_ids": text(2, rows=3)},
        {"input_ids": text(2), "attention_mask": torch.ones(2, 1, 2, 22)},
        {"input_ids": text(2), "attention_mask": torch.ones(2, 1)},
        {"input_ids": text(2), "use_cache": False},
        {"input_ids": text(200), "output_attentions": True},
    ):
        with pytest.raises(ConfigurationError):
            model(past_key_values=cache, **wrong)
    assert gap(read(model, tokens[:, 20:], cache), expected[:, 20:]) < TOLERANCE


@torch.no_grad()
def test_a_token_that_is_none():
    """The model itself fails, before the first layer."""
    model, cache = decoder("llama"), small(decoder("llama"))
    with pytest.raises(IndexError):
        read(model, torch.full((1, 1), 10_000), cache)
    with pytest.raises(ConfigurationError, match="interrupted"):
        read(model, text(3, rows=1), cache)


# --- ways to call ------------------------------------------------------------------------------------------------------------


def test_in_and_out_of_inference_mode():
    model, tokens = decoder("llama"), text(60)
    expected = one_by_one(model, tokens)
    cache, found, at = small(model, rebase_at=30, chunk=7), [], 0
    padding = torch.ones(2, 5)
    padding[0, :2] = 0
    for number, length in enumerate((3, 1, 12, 1, 1, 20, 1, 1, 1, 5, 1, 13)):
        with torch.inference_mode(number % 2 == 0), torch.no_grad():
            piece = tokens[:, at : at + length].clone()
            found.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits.clone())
            if number == 6:
                cache.reorder_cache(torch.tensor([0, 1]))
        at += length
    assert at == 60
    assert gap(torch.cat(found, dim=1), expected) < TOLERANCE
    for inside in (True, False, True):
        with torch.inference_mode(inside), torch.no_grad():
            cache.reset()
            model(input_ids=text(5), attention_mask=padding, past_key_values=cache, use_cache=True)
            model(input_ids=text(1), past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 2]))
        with torch.no_grad():
            model(input_ids=text(1), past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_positional_arguments_and_the_base_model():
    model, tokens = decoder("llama"), text(30)
    expected = model.lm_head(model.model(tokens, None, None, small(model, chunk=7)).last_hidden_state)
    assert gap(expected, slow_logits(model, tokens, SINKS, WINDOW)) < TOLERANCE
    bare = model.model(input_ids=tokens, past_key_values=small(model.model), use_cache=True).last_hidden_state
    assert gap(model.lm_head(bare), expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("kept", [1, 3, 20])
def test_last_logits_only(kept):
    for model in (decoder("llama"), make_sinklm()):
        tokens = text(30)
        expected = read(model, tokens)
        cache = small(model, chunk=8)
        found = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=kept).logits
        assert found.shape[1] == kept
        assert gap(found, expected[:, -kept:]) < TOLERANCE


@torch.no_grad()
def test_as_a_tuple():
    model, tokens = decoder("llama"), text(30)
    found = model(input_ids=tokens, past_key_values=small(model, chunk=8), use_cache=True, return_dict=False)
    assert gap(found[0], read(model, tokens)) < TOLERANCE


@torch.no_grad()
def test_caches_interleaved():
    model, texts = decoder("llama"), [text(30, seed=seed, rows=1 + seed) for seed in range(3)]
    caches, found = [small(model, chunk=4 + seed) for seed in range(3)], [[], [], []]
    for at in range(0, 30, 5):
        for index, cache in enumerate(caches):
            found[index].append(read(model, texts[index][:, at : at + 5], cache))
            model(input_ids=texts[index][:, :3])  # and dense ones in between
    for tokens, mine in zip(texts, found, strict=True):
        assert gap(torch.cat(mine, dim=1), one_by_one(model, tokens)) < TOLERANCE


def test_two_threads():
    model, texts = decoder("llama"), [text(60, seed=seed) for seed in range(2)]
    expected, found = [one_by_one(model, tokens) for tokens in texts], {}

    def work(index):
        found[index] = read(model, texts[index], small(model), pieces=[1] * 20 + [15, 1, 1, 23])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert gap(found[index], expected[index]) < TOLERANCE


# --- the model -----------------------------------------------------------------------------------------------------------


def test_a_bound_model_is_a_model(tmp_path):
    """Its two hooks are in nobody's way: it is copied, pickled, saved, and a copy serves caches of its own."""
    model, tokens = build_decoder("llama"), text(30)
    bound = small(model)
    expected = read(model, tokens, bound)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == 1
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mine = small(twin)
        for _ in range(2):
            assert gap(read(twin, tokens), expected) < TOLERANCE
        assert gap(read(twin, tokens, mine), expected) < TOLERANCE
        assert sum(len(module._forward_pre_hooks) for module in twin.modules()) == 1
        with pytest.raises(ConfigurationError, match="belongs to another model"):
            read(twin, tokens, small(model))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert gap(read(loaded.eval(), tokens), expected) < TOLERANCE
    with torch.no_grad():
        assert gap(model(input_ids=tokens).logits, loaded(input_ids=tokens).logits) < 1e-6


def test_nothing_is_kept_alive():
    model = build_decoder("llama")
    cache = small(model)
    read(model, text(30), cache)
    keys = weakref.ref(cache.layers[0].keys)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert keys() is None
    cache = small(model)
    read(model, text(3), cache)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert cache.model is None


def hooks_of(model) -> int:
    gc.collect()
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_the_last_cache_takes_the_hooks_along():
    model, tokens = build_decoder("llama"), text(30)
    expected = read(model, tokens)
    assert hooks_of(model) == 0
    first, second = small(model), small(model)
    other = PolicyCache(SinkWindow(num_sinks=1, window=6), model)
    assert hooks_of(model) == 2
    assert gap(read(model, tokens[:, :20], first), expected[:, :20]) < TOLERANCE
    del second, other
    assert hooks_of(model) == 2
    assert gap(read(model, tokens[:, 20:], first), expected[:, 20:]) < TOLERANCE  # others have left, and it goes on
    del first
    assert hooks_of(model) == 0
    again = small(model)
    assert hooks_of(model) == 2
    assert gap(read(model, tokens, again), expected) < TOLERANCE


@torch.no_grad()
def test_hooks_leave_after_failures_and_generate():
    model, tokens = build_decoder("llama"), text(5)
    for _ in range(2):
        model.generate(tokens, past_key_values=small(), max_new_tokens=2, pad_token_id=0)
        assert hooks_of(model) == 0
    cache = small(model)
    with pytest.raises(IndexError):
        read(model, torch.full((1, 1), 10_000), cache)
    assert hooks_of(model) == 2
    del cache
    assert hooks_of(model) == 0
    for wrong in ({"rebase_at": 3}, {"chunk": 0}):
        with pytest.raises(ConfigurationError):
            small(model, **wrong)
        assert hooks_of(model) == 0


def test_hooks_of_a_copy_leave_too():
    model, tokens = build_decoder("llama"), text(5)
    bound = small(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin(input_ids=tokens)
    assert (hooks_of(model), hooks_of(twin)) == (2, 0)
    del bound
    assert hooks_of(model) == 0


def test_a_cast_in_the_middle():
    model = build_decoder("llama")
    cache = small(model)
    read(model, text(9), cache)
    model.to(torch.float64)
    with pytest.raises(ConfigurationError, match=r"holds keys of torch\.float32 and is given torch\.float64.*make another"):
        read(model, text(1), cache)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, tokens = build_decoder("llama"), text(30)  # one whose rotations have not been read
    heads = (((1, 4), (1, 8)),) * model.config.num_hidden_layers
    with torch.autocast("cpu", dtype):
        cut, single = read(model, tokens, pieces=[17, 13]), one_by_one(model, tokens)
        for policy in ({"name": "sink_window", "window": 8}, {"name": "per_head", "budgets": heads}):
            assert open_reader(model, policy).read(tokens).dtype == dtype
    assert gap(cut.float(), single.float()) < 0.3 * float(single.float().std())


# --- what is held ------------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow():
    model, cache = decoder("llama"), small(decoder("llama"))
    read(model, text(3), cache)
    held = cache.bytes_held()
    heads, size, slots = 2, 8, SINKS + WINDOW + 1
    assert held == 2 * 2 * 4 * heads * size * (2 * slots + SINKS)  # layers, rows, bytes; keys, values, first forms of the sinks
    buffers = [layer.keys.data_ptr() for layer in cache.layers]
    read(model, text(500), cache, pieces=[400] + [1] * 100)
    assert cache.bytes_held() == held
    assert [layer.keys.data_ptr() for layer in cache.layers] == buffers
    assert cache.get_seq_length() == 503


@pytest.mark.parametrize("kind", ["alike", "padded", "in front", "per head"])
def test_many_pinned_tokens_are_not_copied_for_every_token_of_a_chunk(kind, monkeypatch):
    """A chunk ends where its queries would see the pinned tokens at more distances than there is room for copies."""
    monkeypatch.setattr(slot_table, "COPIES", 48)
    model, tokens, pinned = decoder("llama"), text(70), 8
    if kind == "in front":
        model, pinned = build_in_front(KINDS["both"]), 8 + 3  # learned tokens are pinned too
    policy = SinkWindow(num_sinks=8, window=9)
    make = functools.partial(PolicyCache, policy, model, chunk=32)
    if kind == "per head":
        budgets = PerHead(budgets=(((8, 9),) * 2, ((8, 4),) * 2))
        make = functools.partial(PerHeadCache, budgets, model, chunk=32)
    mask = torch.ones_like(tokens)
    if kind == "padded":
        mask[1, :6] = 0
    given, lengths = {} if kind != "padded" else {"attention_mask": mask}, []
    with monkeypatch.context() as without:
        without.setattr(slot_table, "COPIES", 2**15)
        expected = read(model, tokens, make(), **given)
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    handle = layer.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    found = read(model, tokens, make(), **given)
    handle.remove()
    assert gap(found[mask.bool()], expected[mask.bool()]) < TOLERANCE
    shown = pinned + (4 if kind == "per head" else 9) + 1  # before a token leaves there is one distance
    first, later = (lengths[0], lengths[1:]) if kind != "padded" else (48 // 8, lengths)
    assert first <= shown + 48 // pinned
    assert max(later) == 48 // pinned
    assert sum(lengths) == 70 + pinned - 8


def test_counted_anew_is_the_same():
    """However often positions are counted anew, and with both kinds of them."""
    model, tokens = decoder("llama"), text(150, rows=1)
    for positions in ("in_cache", "original"):
        expected = one_by_one(model, tokens, small(model, positions=positions))
        for room in (1, 8, 40):
            cache = small(model, positions=positions, chunk=1, rebase_at=SINKS + WINDOW + 1 + room)
            assert gap(one_by_one(model, tokens, cache), expected) < TOLERANCE
            assert cache.table.rebases >= 130 // (room + 3)


def test_rounding_does_not_add_up():
    """In bfloat16 the stream is as far from float64 after 1,500 tokens as after 100: sinks are rotated from their first form,
    each time once. Turned by one step 1,400 times over they would be noise."""
    window = 40
    model = build_decoder("llama", max_position_embeddings=4096)
    tokens = text(1_600, rows=1)

    def distances(rebase_at):
        cache = SinkCache(rounded, num_sinks=SINKS, window=window, chunk=64, rebase_at=rebase_at)
        found = read(rounded, tokens, cache, pieces=[1_400, *[1] * 200]).double()
        return (found - exact).square().mean(dim=(0, 2)).sqrt()

    wide = copy.deepcopy(model).double()
    exact = read(wide, tokens, SinkCache(wide, num_sinks=SINKS, window=window))
    rounded = copy.deepcopy(model)
    frequencies = [module for module in rounded.modules() if hasattr(module, "inv_freq")]
    kept = [module.inv_freq.clone() for module in frequencies]
    rounded.to(torch.bfloat16)
    for module, exactly in zip(frequencies, kept, strict=True):  # a cast rounds them too, which is another matter
        module.inv_freq = exactly
    for rebase_at in (None, 200):
        error = distances(rebase_at)
        early, late, single = error[50:250].mean(), error[1_200:1_400].mean(), error[1_400:].mean()
        assert late < 1.25 * early
        assert single < 1.25 * early
        assert early < 0.2 * float(exact.std())
