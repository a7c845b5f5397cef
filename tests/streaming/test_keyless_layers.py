"""Models with layers that write no keys, or keep states beside them: linear attention, feed-forward blocks alone, layers that
share the keys of others, and layers of two halves."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from tests.architectures.zoo import VOCAB
from tests.streaming.decoders import SINKS, TOLERANCE, WINDOW, gap, one_by_one, read, text
from tests.streaming.oracle import slow_logits
from transformers import PreTrainedModel

from sinklab.attention.cache_argument import cache_argument
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.reader import open_reader
from sinklab.streaming.recurrent import RecurrentLayer, continues_in_chunks
from sinklab.streaming.state import load_state, save_state
from sinklab.streaming.stream import Stream

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")} | {
    f"linear_{kind}_head_dim": 8 for kind in ("key", "value")
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
EXPERTS = {"num_experts_per_tok": 1}
TURNS = ["linear_attention", "full_attention"] * 2

RECURRENT = {
    "Qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "head_dim": 8}),
    "OlmoHybrid": ("OlmoHybridConfig", {**DELTA, "layer_types": TURNS}),
    "Lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "shared_intermediate_size": 32},
    ),
    "Jamba": (
        "JambaConfig",
        {**EXPERTS, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
}
HYBRID = {
    "FalconH1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 64}),
    "Zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "mamba_headdim": 16,
            "mamba_d_state": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "use_mem_rope": True,
            "time_step_min": 1e-9,  # by which prompts clamp and single tokens do not
            "num_key_value_heads": 4,
        },
    ),
}
RECURRENT |= HYBRID
SHARED = {
    "Gemma3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["full_attention"] * 4,
            "laurel_rank": 4,
        },
    )
}


@functools.cache
def built(family: str) -> PreTrainedModel:
    """With weights large enough that attention is far from uniform."""
    config, changes = (RECURRENT | SHARED)[family]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model


@pytest.mark.parametrize("family", [*RECURRENT, *SHARED])
def test_as_published(family):
    """The layers with keys follow StreamingLLM, whatever the pieces in which a text comes; the others see all of it."""
    model, tokens = built(family), text(40)
    published = slow_logits(model, tokens, SINKS, WINDOW)
    assert gap(one_by_one(model, tokens), published) < TOLERANCE
    assert gap(read(model, tokens), published) < TOLERANCE
    assert gap(read(model, tokens, pieces=[19, 1, 1, 7, 12]), published) < TOLERANCE
    tight = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=5, rebase_at=SINKS + WINDOW + 6)
    assert gap(read(model, tokens, tight), published) < TOLERANCE
    assert tight.table.rebases >= 3
    assert gap(read(model, tokens, SinkCache(model, num_sinks=0, window=WINDOW)), published) > 0.1


@pytest.mark.parametrize("family", [*RECURRENT, *SHARED])
def test_dense_before_it_is_full(family):
    model, tokens = built(family), text(SINKS + WINDOW + 1)
    with torch.no_grad():
        dense = model(input_ids=tokens, use_cache=False).logits
    assert gap(one_by_one(model, tokens), dense) < TOLERANCE
    assert gap(read(model, tokens), dense) < TOLERANCE


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
    """As long as nothing is evicted: greedily, by beams, whose rows change places, and of a batch of two lengths."""
    model, prompt = built(family), text(9)
    prompt[1, :3] = 0
    given = {"input_ids": prompt, "attention_mask": (prompt > 0).long(), "max_new_tokens": 12, "do_sample": False}
    for beams in (1, 3):
        usual = model.generate(**given, num_beams=beams)
        cache = SinkCache(num_sinks=SINKS, window=40)
        assert torch.equal(model.generate(**given, num_beams=beams, **cache_argument(model, cache)), usual)


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
    for policy in ("heavy_hitter", "value_norm", {"name": "per_head", "budgets": [[[1, 8], [1, 8]]] * 4}):
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
