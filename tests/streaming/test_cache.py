"""The life of a bounded cache: interrupted, interleaved, copied, cast, dropped; and rounding that does not add up."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
import transformers
from tests.architectures.zoo import ZOO, build
from tests.conftest import make_sinklm
from tests.streaming.decoders import (
    SINKS,
    TOLERANCE,
    WINDOW,
    backends_of,
    build_decoder,
    build_in_front,
    decoder,
    gap,
    one_by_one,
    read,
    slow_logits,
    small,
    text,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.loading import load_model
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.streaming import table as tables
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.reader import open_reader, verify_model

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
@pytest.mark.parametrize("kept", [1, 3, 20])
def test_last_logits_only(kept):
    for model in (decoder("llama"), make_sinklm()):
        tokens = text(30)
        expected = read(model, tokens)
        cache = small(model, chunk=8)
        found = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=kept).logits
        assert found.shape[1] == kept
        assert gap(found, expected[:, -kept:]) < TOLERANCE


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
    with torch.autocast("cpu", dtype):
        cut, single = read(model, tokens, pieces=[17, 13]), one_by_one(model, tokens)
        assert open_reader(model, {"name": "sink_window", "window": 8}).read(tokens).dtype == dtype
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


@pytest.mark.parametrize("kind", ["alike", "padded", "in front"])
def test_many_pinned_tokens_are_not_copied_for_every_token_of_a_chunk(kind, monkeypatch):
    """A chunk ends where its queries would see the pinned tokens at more distances than there is room for copies."""
    monkeypatch.setattr(tables, "COPIES", 48)
    model, tokens, pinned = decoder("llama"), text(70), 8
    if kind == "in front":
        model, pinned = build_in_front("in front"), 8 + 3  # learned tokens are pinned too
    policy = SinkWindow(num_sinks=8, window=9)
    make = functools.partial(PolicyCache, policy, model, chunk=32)
    mask = torch.ones_like(tokens)
    if kind == "padded":
        mask[1, :6] = 0
    given, lengths = {} if kind != "padded" else {"attention_mask": mask}, []
    with monkeypatch.context() as without:
        without.setattr(tables, "COPIES", 2**15)
        expected = read(model, tokens, make(), **given)
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    handle = layer.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    found = read(model, tokens, make(), **given)
    handle.remove()
    assert gap(found[mask.bool()], expected[mask.bool()]) < TOLERANCE
    shown = pinned + 9 + 1  # before a token leaves there is one distance
    first, later = (lengths[0], lengths[1:]) if kind != "padded" else (48 // 8, lengths)
    assert first <= shown + 48 // pinned
    assert max(later) == 48 // pinned
    assert sum(lengths) == 70 + pinned - 8


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


NEW = 15
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
PROMPTS = (5, SINKS + WINDOW, 20)
"""Shorter than the cache, just as long, longer."""


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


def by_pipeline(model, tokenizer, prompt, cache):
    said = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    return said(prompt, return_tensors=True, **cache.keyword, **PLAIN)[0]["generated_token_ids"]


def by_streamer(model, tokenizer, prompt, cache):
    streamer = transformers.TextIteratorStreamer(tokenizer)
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), streamer=streamer, **cache.keyword, **PLAIN)[0]
    assert "".join(streamer) == tokenizer.decode(ids)
    return ids.tolist()


def in_turns(model, tokenizer, prompt, cache):
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for count in (10, PLAIN["max_new_tokens"] - 10):
        ids = model.generate(ids, **cache.keyword, **PLAIN | {"max_new_tokens": count})
    return ids[0].tolist()


PLAIN = {"max_new_tokens": 30, "do_sample": False}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", [by_pipeline, by_streamer, in_turns])
def test_every_way_to_generate_says_the_same_and_of_one_text_only(way):
    loaded = load_model("embedded:softmax")
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = tokenizer("def f(x):\n", return_tensors="pt")["input_ids"]
    expected = open_reader(model, SinkWindow(num_sinks=2, window=16))
    logits = expected.read(ids, keep=1)
    for _ in range(PLAIN["max_new_tokens"]):
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        logits = expected.read(ids[:, -1:], keep=1)
    cache = SinkCache(num_sinks=2, window=16)
    assert way(model, tokenizer, "def f(x):\n", cache) == ids[0].tolist()
    with pytest.raises(ConfigurationError, match=r"another text than the cache has read; .*every prompt of a pipeline"):
        way(model, tokenizer, "import os\n" * 20, cache)


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


def model_of(backend: str = "sdpa"):
    return build(ZOO["llama"], backend).eval()


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        ("attention_mask", "does not follow the masks of a bounded cache: 12 tokens read at once and one by one give logits"),
        ("position_ids", "layer 0 of LlamaForCausalLM does not rotate its keys by the position_ids that it is given"),
    ],
)
def test_a_model_that_ignores_what_the_cache_says_is_refused(ignored, said):
    for other in (model_of("eager"), model_of().train()):  # another model says nothing about this one
        training = other.training
        verify_model(other)
        assert other.training == training
    assert torch.is_grad_enabled()
    model = model_of()
    native = model.model.forward

    def forward(*args, position_ids=None, attention_mask=None, **kwargs):
        given = {"position_ids": position_ids, "attention_mask": attention_mask}
        given[ignored] = None
        return native(*args, **given, **kwargs)

    model.model.forward = forward
    with pytest.raises(UnsupportedModelError, match=said):
        verify_model(model)


@pytest.mark.parametrize(
    "policy", [SinkWindow(num_sinks=SINKS, window=WINDOW), Window(window=WINDOW)], ids=lambda policy: policy.name
)
def test_sdpa_gets_no_mask_at_a_token_but_of_many_keys_one_that_packs_heads(policy, monkeypatch):
    masks = []

    def spy(module, query, key, value, attention_mask, **arguments):
        masks.append(attention_mask)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", spy)
    model = build_decoder("llama")
    expected = read(model, text(40), PolicyCache(policy, model), pieces=[1] * 40)
    assert len(masks) >= 40 * model.config.num_hidden_layers
    assert all(mask is None for mask in masks[-40 * model.config.num_hidden_layers :])
    monkeypatch.setattr("sinklab.streaming.cache._PACKED", policy.num_slots)
    assert gap(read(model, text(40), PolicyCache(policy, model), pieces=[1] * 40), expected) < 1e-5
    assert masks[-1].shape == (2, 1, 1, policy.num_slots)
    assert masks[-1].all()
