"""Models whose layers differ, or that have more tokens than the text: each follows the published rule in its own way.

Layers that write no keys or keep states beside them (linear attention, feed-forward blocks alone, layers that share the keys
of others), layers whose sliding window is narrower than what the policy holds, and learned tokens in front.
"""

import copy
import functools

import pytest
import torch
import transformers
from tests.streaming.decoders import (
    IN_FRONT,
    MAMBA,
    RECURRENT,
    SHAPE,
    SHARED,
    SINKS,
    TOLERANCE,
    WINDOW,
    Gapped,
    assert_as_published,
    assert_dense_before_it_is_full,
    assert_generated_as_dense,
    backends_of,
    build_decoder,
    build_in_front,
    built,
    gap,
    one_by_one,
    read,
    slow_logits,
    small,
    text,
)

from sinklab.attention.host_arguments import cache_argument
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.policies.blocks import Blocks
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.layer import RecurrentLayer, SlotLayer
from sinklab.streaming.reader import open_reader
from sinklab.streaming.state import load_state, save_state
from sinklab.streaming.stream import Stream
from sinklab.streaming.table import WindowedTable
from sinklab.streaming.traits import continues_in_chunks

LENGTH, OWN = 40, 5
"""Of texts; and how many tokens narrow layers see, the query's own included."""

FRONT = 3
"""As many learned tokens have the models of ``IN_FRONT``."""

GREEDY = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
POLICY = SinkWindow(num_sinks=SINKS, window=WINDOW)


@functools.cache
def mixed(family="gemma3", backend="eager", own=OWN):
    """Layers of full attention and, between them, layers that see fewer tokens than the policy holds."""
    turns = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return build_decoder(family, backend, **turns, sliding_window=own)


def sharing_narrow():
    """Layers that share the keys of narrow layers and of full ones."""
    config, changes = SHARED["Gemma3n"]
    turns = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": OWN}
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(getattr(transformers, config)(**SHAPE, **{**changes, **turns})).eval()
    model.apply(lambda module: [torch.nn.init.normal_(weight, 0, 0.25) for weight in module.parameters() if weight.ndim > 1])
    return model


NARROW = [
    (family, backend)
    for family in ("gemma2", "gemma3", "olmo3", "cohere2", "gpt_oss", "granite_swa", "mimo_v2_flash")
    for backend in backends_of(family)
]
KINDS = {
    **{family: functools.partial(built, family) for family in (*RECURRENT, *SHARED)},
    **{f"narrow {family} {backend}": functools.partial(mixed, family, backend) for family, backend in NARROW},
    **{kind: functools.partial(build_in_front, kind) for kind in IN_FRONT},
    "narrow, shared": sharing_narrow,
}
"""Every kind, and how a model of it is made."""

SOME = ("Qwen3_5", "Jamba", "FalconH1", "narrow gemma3 eager", "in front")


@pytest.mark.parametrize("kind", KINDS)
def test_as_published(kind):
    """Layers with keys follow StreamingLLM, whatever the pieces in which a text comes; the others see all of it, or a window of
    their own; learned tokens stay with the sinks."""
    model, tokens = KINDS[kind](), text(LENGTH)
    assert_as_published(model)
    if kind in RECURRENT:
        without = SinkCache(model, num_sinks=0, window=WINDOW)
        assert gap(read(model, tokens, without), read(model, tokens, small(model))) > 0.1
    if kind.startswith("narrow"):
        assert isinstance(small(model).table, WindowedTable)
    if getattr(model, "tokens_in_front", 0):  # without them it would be something else
        found = read(model, tokens, small(model))
        assert gap(slow_logits(model, tokens, SINKS, WINDOW, front=0), found) > 0.1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("narrow")])
def test_dense_before_it_is_full(kind):
    assert_dense_before_it_is_full(KINDS[kind]())


@pytest.mark.parametrize("kind", ["Qwen3_5", "Gemma3n", "FalconH1", "narrow gemma3 eager"])
def test_generated_as_with_a_cache_of_transformers(kind):
    assert_generated_as_dense(KINDS[kind]())


@pytest.mark.parametrize("kind", [*RECURRENT, "narrow gemma3 eager"])
def test_rows_padded_on_the_left_are_the_rows_alone(kind):
    """In pieces, the padding in one of them and then reaching into the next."""
    model, tokens, pad = KINDS[kind](), text(LENGTH), 7
    tokens[1, :pad] = 0
    mask = torch.ones_like(tokens)
    mask[1, :pad] = 0
    alone = read(model, tokens[1:, pad:])
    assert gap(read(model, tokens, attention_mask=mask)[1:, pad:], alone) < TOLERANCE
    cache, logits = small(model), []
    for start, end in ((0, 3), (3, 12), (12, 13), (13, LENGTH)):
        logits.append(read(model, tokens[:, start:end], cache, attention_mask=mask[:, :end]))
    assert gap(torch.cat(logits, dim=1)[1:, pad:], alone) < TOLERANCE


@pytest.mark.parametrize("kind", SOME)
def test_a_stream_resumed_from_a_file_and_one_that_was_copied(kind, tmp_path):
    model, tokens = KINDS[kind](), text(60, rows=1)
    whole = SinkCache(model, num_sinks=SINKS, window=WINDOW, rebase_at=40, chunk=8)
    read(model, tokens[:, :45], whole)
    save_state(whole, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors", model)
    copied = copy.deepcopy(whole)
    expected = one_by_one(model, tokens[:, 45:], whole)
    assert whole.table.rebases
    assert torch.equal(one_by_one(model, tokens[:, 45:], again.cache), expected)
    assert torch.equal(one_by_one(model, tokens[:, 45:], copied), expected)


def test_in_integers():
    tokens = text(LENGTH)
    for model, most in ((built("Qwen3_5"), 0.1), (built("FalconH1"), 0.5), (mixed(own=12), 0.5)):
        exact = one_by_one(model, tokens, SinkCache(model, num_sinks=SINKS, window=32))
        rounded = SinkCache(model, num_sinks=SINKS, window=32, quantized="int8")
        assert 0 < gap(one_by_one(model, tokens, rounded), exact) < most
        assert rounded.layers[3].values is None  # between the steps there are codes


# --- states -----------------------------------------------------------------------------------------------------------------


def test_what_a_cache_with_states_holds():
    model = built("Qwen3_5")
    cache = small(model)
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


@pytest.mark.parametrize("family", RECURRENT)
def test_a_model_that_begins_anew_in_a_second_chunk_is_read_token_by_token(family):
    """Jamba forgets its state when several tokens are given at once, in transformers 5.24; the others go on. Under the policy
    `full` too, whose cache is one of transformers."""
    model, tokens = built(family), text(20, rows=1)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
        pieces = [model(input_ids=piece, **cache_argument(model, cache)).logits for piece in tokens.split(10, dim=1)]
    goes_on = gap(torch.cat(pieces, dim=1), whole) < TOLERANCE
    assert continues_in_chunks(model) == goes_on
    assert small(model).chunk == (128 if goes_on else 1)
    reader = open_reader(model, "full")
    pieces = [reader.read(piece) for piece in tokens.split([6, 5, 1, 8], dim=1)]
    assert gap(torch.cat(pieces, dim=1), whole) < TOLERANCE
    reader.reset()
    reader.read(tokens[:, :6])
    assert gap(reader.read(tokens[:, 6:], keep=3), whole[:, -3:]) < TOLERANCE


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_state_that_is_nearly_right_is_wrong(seed):
    """With these weights Jamba's states are off by 6 to 14 %, and a text that goes on after them has other tokens."""
    model = copy.deepcopy(built("Jamba"))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "A_log" not in name and "conv1d" not in name:
            weight.data.normal_(0, 0.2, generator=generator)
    tokens = text(30, rows=1)
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
        assert gap(read(model, tokens, SinkCache(model, num_sinks=SINKS, window=60), pieces=[12, 18]), whole) < TOLERANCE


def test_padding_behind_a_token_ends_a_row():
    model, tokens = built("Qwen3_5"), text(12)
    cache = small(model)
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0  # on the right, as of a row that has ended
    alone = read(model, tokens[:1])
    assert gap(read(model, tokens, cache, attention_mask=mask)[:1], alone) < TOLERANCE
    more = torch.cat((mask, torch.tensor([[1], [0]])), dim=1)
    read(model, tokens[:, :1], cache, attention_mask=more)
    with pytest.raises(ConfigurationError, match="row 1 has padding between its tokens"):
        read(model, tokens[:, :1], cache, attention_mask=torch.cat((more, torch.ones(2, 1, dtype=torch.long)), dim=1))
    assert not cache._unfinished


def test_states_refuse_to_go_back():
    model = built("Qwen3_5")
    with pytest.raises(ConfigurationError, match="takes tokens back, and layers of linear attention of Qwen3_5ForCausalLM"):
        small(model, rollback=2)
    cache = small(model)
    read(model, text(12), cache)
    with pytest.raises(ConfigurationError, match="tokens cannot be taken back: layers of linear attention"):
        cache.crop(-1)
    linear = transformers.BambaConfig(**SHAPE, **MAMBA, attn_layer_indices=[])
    with pytest.raises(UnsupportedModelError, match="BambaForCausalLM has no layer of attention: its states have one size"):
        small(transformers.BambaForCausalLM(linear).eval())


# --- narrow windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "backend"), NARROW)
def test_original_positions_are_a_mask_for_each_kind_of_layer(family, backend):
    model, tokens = mixed(family, backend), text(LENGTH)
    cache = small(model, positions="original")
    index = torch.arange(LENGTH)
    distance = index[:, None] - index
    masks = {
        "full_attention": cache.policy.visible(index[:, None], index),
        "sliding_attention": (distance >= 0) & (distance < OWN),
    }
    for kind, visible in masks.items():
        visible = visible.expand(len(tokens), 1, -1, -1)
        hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        masks[kind] = visible if backend == "sdpa" else hidden
    with torch.no_grad():
        dense = model(input_ids=tokens, attention_mask=masks, use_cache=False).logits
    assert gap(one_by_one(model, tokens, cache), dense) < TOLERANCE
    cache.reset()
    assert gap(read(model, tokens, cache, pieces=[19, 1, 20]), dense) < TOLERANCE


def test_narrow_layers_before_the_cache_is_full():
    """Far past their own window, as in the model itself; a window as wide as the policy follows it."""
    model, tokens = mixed(), text(30)
    with torch.no_grad():
        dense = model(input_ids=tokens, use_cache=False).logits
    for chunk in (128, 7, 1):
        assert gap(read(model, tokens, SinkCache(model, num_sinks=SINKS, window=40, chunk=chunk)), dense) < TOLERANCE
    assert not isinstance(small(mixed(own=SINKS + WINDOW + 1)).table, WindowedTable)
    with pytest.raises(UnsupportedModelError, match="layers that see 5 tokens"):
        small(build_decoder("mistral", "eager", sliding_window=OWN))  # narrow layers alone


def test_narrow_layers_with_an_assistant_and_taken_back():
    """Tokens that a crop brings back into a window are there again in both kinds of layers, or it is refused in both."""
    model, tokens = mixed(), text(LENGTH, rows=1)
    expected = one_by_one(model, tokens, small(model))
    cache = small(model, rollback=3)
    read(model, torch.cat((tokens[:, :30], tokens[:, :3]), dim=1), cache)
    cache.crop(-3)
    assert gap(one_by_one(model, tokens[:, 30:], cache), expected[:, 30:]) < TOLERANCE
    wide = SinkCache(model, num_sinks=SINKS, window=30)
    read(model, tokens[:, :20], wide)
    before = wide.table.seen.clone(), wide.table.narrow.seen.clone()
    with pytest.raises(ConfigurationError, match="have been evicted since"):
        wide.crop(-2)  # there in the full layers, and gone in the narrow ones
    assert (wide.table.seen, wide.table.narrow.seen) == before


def test_bytes_are_those_of_what_each_layer_holds():
    model = mixed()
    cache = small(model)
    read(model, text(30), cache)
    narrow, full = (layer.bytes_held() for layer in cache.layers[:2])
    assert narrow / full == pytest.approx(OWN / (SINKS + WINDOW + 1 + SINKS / 2))  # keys of pinned tokens are there twice
    assert cache.bytes_held() == 2 * (narrow + full)


# --- learned tokens in front ----------------------------------------------------------------------------------

POLICIES = (
    SinkWindow(num_sinks=SINKS, window=WINDOW, positions="original"),
    Pinned(pinned=(1, 7), window=WINDOW, positions="original"),
    Gapped(span=12),
    Window(window=WINDOW, positions="original"),
    Blocks(num_sinks=SINKS, block=4, blocks=3, positions="original"),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_original_positions_are_a_mask(policy):
    """The model without a cache, under the mask that the policy is, the learned tokens seen by all."""
    model, tokens = build_in_front("in front"), text(LENGTH)
    index = torch.arange(LENGTH)
    mask = torch.ones(FRONT + LENGTH, FRONT + LENGTH, dtype=torch.bool).tril()
    mask[FRONT:, FRONT:] = policy.visible(index[:, None], index)
    with torch.no_grad():
        masked = model(input_ids=tokens, attention_mask=mask.expand(2, 1, -1, -1), use_cache=False).logits
    for pieces in (None, [1] * LENGTH, [11, 1, 28]):
        assert gap(read(model, tokens, PolicyCache(policy, model, chunk=6), pieces=pieces), masked) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("kind", IN_FRONT)
def test_a_padded_row_is_the_row_alone(kind):
    model, rows = build_in_front(kind), [text(length, rows=1, seed=length)[0] for length in (30, 21, 6)]
    tokens, mask = torch.zeros(3, 30, dtype=torch.long), torch.zeros(3, 30, dtype=torch.long)
    for row, ids in enumerate(rows):
        tokens[row, 30 - len(ids) :], mask[row, 30 - len(ids) :] = ids, 1
    more = text(9, rows=3, seed=5)
    for chunk in (4, 128):
        cache = small(model, chunk=chunk)
        first = model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        second = model(input_ids=more, past_key_values=cache, use_cache=True).logits
        for row, ids in enumerate(rows):
            alone = read(model, torch.cat((ids, more[row]))[None], small(model))[0]
            assert gap(first[row, 30 - len(ids) :], alone[: len(ids)]) < TOLERANCE
            assert gap(second[row], alone[len(ids) :]) < TOLERANCE


@pytest.mark.parametrize("kind", IN_FRONT)
def test_generate_and_stream(kind):
    """Greedy tokens are those of the slow rule; a second call reads what is new, whatever stands in front."""
    model, prompt, cache = build_in_front(kind), text(20), small()
    found = model.generate(prompt, past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == found.shape[1] - 1
    again = model.generate(torch.cat((found, text(4, seed=9)), dim=1), past_key_values=cache, **GREEDY)
    for said in (found, again):
        expected = slow_logits(model, said[:, :-1], SINKS, WINDOW, front=model.tokens_in_front)[:, -15:].argmax(dim=-1)
        assert (expected == said[:, -15:]).all()
    source = Stream(model, policy=POLICY, stop_ids=(), chunk=3).feed(prompt[0])
    assert source.position == 20
    assert [token.id for token in source.generate(15)] == found[0, -15:].tolist()


@torch.no_grad()
def test_taken_back_and_reset():
    model, tokens = build_in_front("in front"), text(11)
    cache = small(model)
    read(model, tokens, cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 8
    more = text(20, seed=4)
    expected = read(model, torch.cat((tokens[:, :8], more), dim=1), small(model))[:, 8:]
    assert gap(read(model, more, cache), expected) < TOLERANCE
    cache.reset()
    assert cache.get_seq_length() == 0
    assert gap(read(model, tokens, cache), read(model, tokens, small(model))) == 0


def test_what_is_held_with_tokens_in_front():
    model = build_in_front("in front")
    cache = small(model)
    read(model, text(30, rows=1), cache)
    described = cache.describe()
    learned = described[described["token"] < FRONT]
    assert learned["pinned"].all()
    assert learned["id"].isna().all()
    assert described["pinned"].sum() == FRONT + SINKS
    # In the cache: the learned tokens, the sinks and the window, one behind the other, next to the token to come.
    distances = sorted(described["distance"].dropna().astype(int))
    assert distances == list(range(1, FRONT + SINKS + WINDOW + 1))
    telemetry = cache.telemetry()
    assert telemetry.capacity == FRONT + SINKS + WINDOW + 1
    assert telemetry.evicted == (30 - SINKS - WINDOW - 1,)


def test_a_prefix_is_refused():
    model = build_in_front.__wrapped__("in front", prefix=5)
    for opened in (small, lambda model: open_reader(model, "full"), Stream):
        with pytest.raises(UnsupportedModelError, match="the first 5 tokens of a text see each other both ways in SinkLM"):
            opened(model)


def test_narrow_windows_behind_learned_tokens():
    windowed = build_in_front("in front", window=14)
    with pytest.raises(UnsupportedModelError, match="layers that see 14 tokens; the policy holds 15"):
        small(windowed)
    tokens, narrower = text(LENGTH), SinkWindow(num_sinks=SINKS, window=WINDOW - 1)
    expected = slow_logits(windowed, tokens, SINKS, WINDOW - 1, front=FRONT)
    assert gap(read(windowed, tokens, PolicyCache(narrower, windowed)), expected) < TOLERANCE
