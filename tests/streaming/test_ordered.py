"""Caches in the order of the text, for biases that count the keys, and windows that are read anew."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.architectures.zoo import GPT2, VOCAB, enliven, grouped, shape
from tests.streaming.decoders import Gapped
from torch import Tensor
from transformers.models.falcon import modeling_falcon

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.blocks import Blocks
from sinklab.policies.pinned import Pinned
from sinklab.policies.recompute import Recompute
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.streaming import reader as readers
from sinklab.streaming.cache import PolicyCache, SinkCache
from sinklab.streaming.reader import open_reader

HEADS, LENGTH = 4, 34
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
FAMILIES = ("bloom", "mpt", "falcon", "alibi", "relative", "bucket_index")
POLICIES = (
    SinkWindow(num_sinks=2, window=8), Window(window=6), Pinned(pinned=(0, 5, 20), window=6), Blocks(num_sinks=2, block=4),
)  # fmt: skip

TOLERANCE = 1e-4
"""Sums of some tens of products of size up to ten, each rounded to 2**-24, through two layers: 1e-5 at most in practice. A bias
that is off by one column moves these logits by more than 0.05 (test_the_oracle_can_tell)."""


def build(family: str):
    torch.manual_seed(0)
    if family == "bloom":
        model = transformers.BloomForCausalLM(transformers.BloomConfig(**shape(n_layer=2, n_head=HEADS)))
    elif family == "mpt":
        model = transformers.MptForCausalLM(
            transformers.MptConfig(vocab_size=VOCAB, d_model=32, n_heads=HEADS, n_layers=2, max_seq_len=64)
        )
    elif family == "falcon":
        model = transformers.FalconForCausalLM(transformers.FalconConfig(**shape(alibi=True, new_decoder_architecture=False)))
    else:
        model = SinkLM(SinkLMConfig(**shape(head_dim=8, position={"name": family}), operation={"name": "softmax"}))
    enliven(model, seed=7)
    return model.eval()


@pytest.fixture(scope="module")
def models():
    return {family: build(family) for family in FAMILIES}


def text(length: int = LENGTH, rows: int = 1, seed: int = 3) -> Tensor:
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def biases(model, columns: int) -> Tensor:
    """The model's own bias ``(heads, columns)`` of the newest of so many columns."""
    if isinstance(model, SinkLM):
        position = torch.tensor([[columns - 1]])
        return model.position.score_bias(position, torch.arange(columns)[None])[0, :, 0]
    if isinstance(model, transformers.MptForCausalLM):
        return model.transformer.build_mpt_alibi_tensor(HEADS, 64)[:, 0, 64 - columns :]
    build = modeling_falcon if isinstance(model, transformers.FalconForCausalLM) else transformers.models.bloom.modeling_bloom
    return build.build_alibi_tensor(torch.ones(1, columns, dtype=torch.long), HEADS, torch.float32)[:, 0]


@torch.no_grad()
def by_hand(model, tokens: Tensor, policy, monkeypatch, off: int = 0) -> Tensor:
    """One dense forward in which each query's bias counts the tokens that the policy holds at that query, and no others."""
    length = tokens.shape[1]
    index = torch.arange(length)
    visible = policy.visible(index[:, None], index[None])
    table = torch.zeros(HEADS, length, length)
    for query in range(length):
        held = visible[query].nonzero().flatten()
        shown = biases(model, len(held) + off)[:, : len(held)]
        table[:, query, held] = shown
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with monkeypatch.context() as patch:
        if isinstance(model, SinkLM):
            patch.setattr(model.position, "score_bias", lambda queries, keys: table[None])
            mask = visible[None, None]
        elif isinstance(model, transformers.MptForCausalLM):
            patch.setattr(model.transformer, "build_mpt_alibi_tensor", lambda *args, **kwargs: table)
        elif isinstance(model, transformers.BloomForCausalLM):
            patch.setattr(model.transformer, "build_alibi_tensor", lambda *args, **kwargs: table)
        else:
            patch.setattr(modeling_falcon, "build_alibi_tensor", lambda *args, **kwargs: table)
        return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


@torch.no_grad()
def read(model, tokens: Tensor, cache, pieces=(LENGTH,), **arguments) -> Tensor:
    parts = tokens.split(list(pieces), dim=1)
    return torch.cat([model(input_ids=part, past_key_values=cache, **arguments).logits for part in parts], dim=1)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
@pytest.mark.parametrize("family", FAMILIES)
def test_as_by_hand(models, family, policy, monkeypatch):
    model, tokens = models[family], text()
    expected = by_hand(model, tokens, policy, monkeypatch)
    for pieces in ([LENGTH], [1] * LENGTH, [7, 1, 13, 2, 11]):
        found = read(model, tokens, PolicyCache(policy, model), pieces)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_can_tell(models, family, monkeypatch):
    """Without eviction it is the model; and one column too many on the sinks' side of the bias shows."""
    model, tokens = models[family], text(12)
    wide = SinkWindow(num_sinks=2, window=20)
    with torch.no_grad():
        dense = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(by_hand(model, tokens, wide, monkeypatch), dense, atol=TOLERANCE, rtol=0)
    narrow = SinkWindow(num_sinks=2, window=3)
    original = by_hand(model, tokens, wide, monkeypatch)
    assert float((by_hand(model, tokens, narrow, monkeypatch) - original).abs().max()) > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_are_the_rows_alone(models, family):
    model, policy = models[family], POLICIES[0]
    short, long = text(19, seed=5), text(LENGTH, seed=6)
    pads = LENGTH - 19
    tokens = torch.cat((torch.cat((torch.zeros(1, pads, dtype=torch.long), short), dim=1), long))
    mask = torch.ones_like(tokens)
    mask[0, :pads] = 0
    alone = [read(model, row, PolicyCache(policy, model), [row.shape[1]]) for row in (short, long)]
    for pieces in ([LENGTH], [4, 20, 1, 9]):
        reader = open_reader(model, policy)
        parts = zip(tokens.split(pieces, dim=1), mask.split(pieces, dim=1), strict=True)
        found = torch.cat([reader.read(part, shown) for part, shown in parts], dim=1)
        torch.testing.assert_close(found[:1, pads:], alone[0], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(found[1:], alone[1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_between_turns(models, family):
    """The first row says less in its first turn; the hole behind it is closed."""
    model, policy = models[family], POLICIES[0]
    whole = text(30, rows=2, seed=8)
    turn = whole.clone()
    mask = torch.ones_like(whole)
    turn[0, 9:14], mask[0, 9:14] = 0, 0
    alone = read(model, torch.cat((turn[:1, :9], turn[:1, 14:]), dim=1), PolicyCache(policy, model), [25])
    other = read(model, whole[1:], PolicyCache(policy, model), [30])
    reader = open_reader(model, policy)
    found = torch.cat([reader.read(turn[:, :14], mask[:, :14]), reader.read(turn[:, 14:], mask[:, 14:])], dim=1)
    torch.testing.assert_close(torch.cat((found[:1, :9], found[:1, 14:]), dim=1), alone, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found[1:], other, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_is_the_loop(models, family):
    model, policy, prompt = models[family], POLICIES[0], text(15)
    cache = PolicyCache(policy, model)
    made = model.generate(prompt, past_key_values=cache, **GREEDY)
    reader, token, tokens = open_reader(model, policy), prompt, []
    for _ in range(12):
        token = reader.read(token, keep=1)[:, -1].argmax(dim=-1, keepdim=True)
        tokens.append(token)
    assert made[:, 15:].tolist() == torch.cat(tokens, dim=1).tolist()
    assert cache.layers[0].keys.shape[2] == policy.num_slots
    assert cache.get_seq_length() == 26


@pytest.mark.parametrize("family", ["bloom", "alibi"])
def test_reset_crop_and_beams(models, family):
    model, policy, tokens = models[family], POLICIES[0], text(rows=3)
    cache = PolicyCache(policy, model)
    first = read(model, tokens, cache)
    cache.reset()
    assert torch.equal(read(model, tokens, cache), first)
    with pytest.raises(ConfigurationError, match="cannot go back to 30 tokens: 4 of the 11 that the policy held then"):
        cache.crop(30)
    cache.reset()
    read(model, tokens[:, :10], cache, [10])
    cache.crop(-3)
    assert cache.get_seq_length() == 7
    torch.testing.assert_close(read(model, tokens[:, 7:], cache, [LENGTH - 7]), first[:, 7:], atol=TOLERANCE, rtol=0)

    cache.reset()
    read(model, tokens[:, :20], cache, [20])
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    found = read(model, tokens[order][:, 20:], cache, [LENGTH - 20])
    torch.testing.assert_close(found, first[order][:, 20:], atol=TOLERANCE, rtol=0)


def test_as_much_as_fits_is_read_at_once(models):
    """A prompt costs one forward until the cache is full, and one for each token from then on."""
    model = models["bloom"]
    calls = []
    handle = model.transformer.h[0].register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
    read(model, text(), SinkCache(model, num_sinks=2, window=8, chunk=6))
    handle.remove()
    assert calls == [6, 5, *[1] * (LENGTH - 11)]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_original_positions_without_gaps_are_those_in_the_cache(models, family):
    """What a window holds is as far from the query as in the text."""
    found = [
        open_reader(models[family], Window(window=6, positions=positions)).read(text())
        for positions in ("original", "in_cache")
    ]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_refusals(models):
    with pytest.raises(
        UnsupportedModelError, match=r"Bloom.* counts the keys .* '2\+8, original positions' wants those in the text, with gaps"
    ):
        PolicyCache(SinkWindow(num_sinks=2, window=8, positions="original"), models["bloom"])
    with pytest.raises(UnsupportedModelError, match="SinkLM adds a bias that counts the keys"):
        open_reader(models["alibi"], Gapped())
    with pytest.raises(UnsupportedModelError, match=r"Mpt.* has biases for 64 keys and the policy holds 65; choose a smaller"):
        PolicyCache(Window(window=64), models["mpt"])
    tokens = text(4)
    with pytest.raises(ConfigurationError, match=r"no gradient; run under torch.no_grad"):
        models["bloom"](input_ids=tokens, past_key_values=PolicyCache(POLICIES[0], models["bloom"]))
    # The config of this family says use_cache=False, and so does generate().
    with pytest.raises(ConfigurationError, match=r"MptModel is given a cache and use_cache=False, .* pass use_cache=True"):
        models["mpt"].generate(tokens, past_key_values=PolicyCache(POLICIES[0], models["mpt"]), max_new_tokens=2)
    cache = PolicyCache(POLICIES[0], models["bloom"])
    with pytest.raises(ConfigurationError, match="outside of its model's forward"):
        cache.layers[0].update(torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8))
    reader = open_reader(models["bloom"], POLICIES[0])
    reader.read(text(5, rows=2), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]))
    with pytest.raises(ConfigurationError, match="a padded batch cannot be cropped"):
        reader.cache.crop(2)


SHORT = 26


def enlivened(model):
    enliven(model, seed=5)
    return model.eval()


RECOMPUTED = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped())),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**shape(ffn_dim=48, word_embed_proj_dim=32, hidden_act="gelu"))
    ),
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**shape(n_layer=2, n_head=4))),
    "learned": lambda: SinkLM(SinkLMConfig(**shape(head_dim=8, position={"name": "learned"}))),
}


@pytest.fixture(scope="module")
def recomputed():
    return {name: enlivened(make()) for name, make in RECOMPUTED.items()}


@torch.no_grad()
def slowly(model, tokens: Tensor, window: int, every: int = 1, off: int = 0) -> Tensor:
    """Every token from a forward of its own over the tokens of its window, at positions from 0."""
    found = []
    for t in range(tokens.shape[1]):
        block_end = (t // every + 1) * every
        start = min(t, max(0, block_end - (window + 1) + off))
        found.append(model(input_ids=tokens[:, start : t + 1], use_cache=False).logits[:, -1:])
    return torch.cat(found, dim=1)


def read_through(model, policy, tokens: Tensor, pieces=(SHORT,)) -> Tensor:
    reader = open_reader(model, policy)
    return torch.cat([reader.read(piece) for piece in tokens.split(list(pieces), dim=1)], dim=1)


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("family", RECOMPUTED)
def test_as_one_at_a_time(recomputed, family, every):
    model, tokens, policy = recomputed[family], text(SHORT, rows=2), Recompute(window=7, every=every)
    expected = slowly(model, tokens, 7, every)
    for pieces in ([SHORT], [1] * SHORT, [5, 1, 9, 11]):
        torch.testing.assert_close(read_through(model, policy, tokens, pieces), expected, atol=TOLERANCE, rtol=0)
    assert float((slowly(model, tokens, 7, every, off=1) - expected).abs().max()) > 0.05


@pytest.mark.parametrize("every", [1, 3, 8])
def test_tokens_that_are_passed_over_are_seen_and_not_encoded(recomputed, every):
    model, tokens, policy = recomputed["llama"], text(SHORT, rows=2), Recompute(window=7, every=every)
    expected = slowly(model, tokens, 7, every)
    for pieces in ([4, 22], [13, 13], [2, 9, 6, 9]):
        reader, at = open_reader(model, policy), 0
        for number, piece in enumerate(tokens.split(pieces, dim=1)):
            at += piece.shape[1]
            if number % 2 == 0:
                with forwards(model) as seen:
                    reader.pass_over(piece)
                assert seen == []
                assert reader.position == at
            else:
                found = reader.read(piece)
                torch.testing.assert_close(found, expected[:, at - piece.shape[1] : at], atol=TOLERANCE, rtol=0)


@contextlib.contextmanager
def forwards(model) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the tokens of every forward of the model inside."""
    seen: list[tuple[int, ...]] = []
    handle = model.register_forward_pre_hook(lambda *given: seen.append(tuple(given[2]["input_ids"].shape)), with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), window=st.integers(1, 12))
def test_any_division(recomputed, data, window):
    """Any block size, any division into calls, and any number of logits asked for in each."""
    model = recomputed["llama"]
    every = data.draw(st.integers(1, window + 1))
    tokens = text(SHORT)
    expected = slowly(model, tokens, window, every)
    reader, position = open_reader(model, Recompute(window=window, every=every)), 0
    while position < SHORT:
        size = data.draw(st.integers(1, SHORT - position))
        keep = data.draw(st.integers(0, size))
        found = reader.read(tokens[:, position : position + size], keep=keep)
        position += size
        kept = keep or size
        assert found.shape[1] == kept
        torch.testing.assert_close(found, expected[:, position - kept : position], atol=TOLERANCE, rtol=0)
    assert reader.position == SHORT


def shapes_of_forwards(model, read_through):
    with forwards(model) as shapes:
        read_through()
    return shapes


def test_work_and_memory(recomputed, monkeypatch):
    """Many windows a forward, but no more than so many tokens; and only windows whose logits are asked for."""
    model, tokens = recomputed["llama"], text(SHORT, rows=2)
    monkeypatch.setattr(readers, "_AT_ONCE", 40)
    reader = open_reader(model, Recompute(window=7))
    assert shapes_of_forwards(model, lambda: reader.read(tokens)) == [(2, 8), *[(5, 8)] * 7, (1, 8)]
    reader.reset()
    assert shapes_of_forwards(model, lambda: reader.read(tokens, keep=2)) == [(4, 8)]
    assert reader.bytes_held() == 2 * 7 * 8
    reader.reset()
    # Inside the first window tokens are decoded with a cache, as in a block of several.
    assert shapes_of_forwards(model, lambda: [reader.read(tokens[:, :5]), reader.read(tokens[:, 5:6])]) == [(2, 5), (2, 1)]
    assert reader.bytes_held() == 2 * 6 * 8 + 2 * 2 * (2 * 2 * 6 * 8) * 4  # ids; two layers' keys and values in two heads
    blocks = open_reader(model, Recompute(window=7, every=4))
    assert shapes_of_forwards(model, lambda: blocks.read(tokens)) == [(2, 8), (5, 8), (3, 8), (2, 6)]


@pytest.mark.parametrize("every", [1, 3])
def test_padding(recomputed, every):
    model, tokens, mask = recomputed["gpt2"], text(SHORT, rows=3), torch.ones(3, SHORT, dtype=torch.long)
    mask[1, :9] = 0
    mask[2, 12:15] = 0
    mask[2, 24:] = 0
    reader = open_reader(model, Recompute(window=7, every=every))
    cuts = [(0, 6), (6, 14), (14, SHORT)]
    found = torch.cat([reader.read(tokens[:, a:b], mask[:, a:b]) for a, b in cuts], dim=1)
    for row in range(3):
        shown = mask[row].bool()
        expected = slowly(model, tokens[row : row + 1, shown], 7, every)
        torch.testing.assert_close(found[row, shown], expected[0], atol=TOLERANCE, rtol=0)
        assert not bool(found[row, ~shown].any())
    reader.reset()
    last = reader.read(tokens, mask, keep=3)
    torch.testing.assert_close(last, found[:, -3:], atol=TOLERANCE, rtol=0)
    assert reader.position == SHORT
    reader.reset()  # padding that comes late
    reader.read(tokens[:, :11])
    late = reader.read(tokens[:, 11:], mask[:, 11:])
    torch.testing.assert_close(late[2, mask[2, 11:].bool()], found[2, 11:][mask[2, 11:].bool()], atol=TOLERANCE, rtol=0)
    with pytest.raises(ConfigurationError, match="the attention mask hides all tokens"):
        reader.read(tokens, torch.zeros_like(mask))


def test_first_and_visible():
    policy = Recompute(window=9, every=4)
    assert [policy.first(t) for t in (0, 7, 8, 11, 12)] == [0, 0, 2, 2, 6]
    index = torch.arange(30)
    visible = policy.visible(index[:, None], index[None])
    for t in range(30):
        assert visible[t].nonzero().flatten().tolist() == list(range(policy.first(t), t + 1))
        assert int(visible[t].sum()) <= policy.max_held(t + 1)
    assert policy.describe() == "recompute 9, every 4"
    assert Recompute(window=9).describe() == "recompute 9"


def test_windows_refused(recomputed):
    with pytest.raises(ConfigurationError, match="GPT2LMHeadModel has 64 learned positions and a window has 65 tokens"):
        open_reader(recomputed["gpt2"], Recompute(window=64))
    with pytest.raises(ConfigurationError, match="OPTForCausalLM has 64 learned positions"):
        open_reader(recomputed["opt"], Recompute(window=64))
    with pytest.raises(ConfigurationError, match="SinkLM has 64 learned positions"):
        open_reader(recomputed["learned"], Recompute(window=64))
    open_reader(recomputed["gpt2"], Recompute(window=63)).read(text(66))
    open_reader(recomputed["llama"], Recompute(window=80)).read(text(90))
    encoder_decoder = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        open_reader(encoder_decoder, "recompute")


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", {"name": "recompute", "window": 60}])
def test_the_pictures_of_a_generation_before_move_no_text(policy):
    """Qwen2-VL remembers by how much they have moved positions, and adds it to what is read_through behind a cache."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    words = {**sizes, "vocab_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_parameters": rope}
    eyes = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    special = {"image_token_id": 39, "video_token_id": 38, "vision_start_token_id": 37, "vision_end_token_id": 36}
    config = transformers.Qwen2VLConfig(text_config=words, vision_config=eyes, **special)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    tokens = torch.randint(3, 36, (1, 30), generator=torch.Generator().manual_seed(0))
    dense = model(input_ids=tokens, use_cache=False).logits
    seen = tokens.clone()
    seen[:, 4:20] = 39
    picture = {"pixel_values": torch.randn(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    model.generate(seen, mm_token_type_ids=(seen == 39).int(), max_new_tokens=2, do_sample=False, **picture)
    assert model.model.rope_deltas.item() < 0
    reader = open_reader(model, policy)
    logits = torch.cat([reader.read(piece) for piece in tokens.split(10, dim=1)], dim=1)
    torch.testing.assert_close(logits, dense, rtol=0, atol=1e-5)
