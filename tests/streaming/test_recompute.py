"""Windows that are read anew, against a forward of its own for every token."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.architectures.zoo import GPT2, VOCAB, enliven, grouped, shape
from tests.streaming.decoders import text
from torch import Tensor

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.recompute import Recompute
from sinklab.streaming import reader as readers
from sinklab.streaming.reader import open_reader

TOLERANCE = 1e-4
"""Sums of some tens of products of size up to ten, each rounded to 2**-24, through two layers: 1e-5 at most in practice."""


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
def slowly(model, tokens: Tensor, window: int, off: int = 0) -> Tensor:
    """Every token from a forward of its own over the tokens of its window, at positions from 0."""
    found = []
    for t in range(tokens.shape[1]):
        start = min(t, max(0, t - window + off))
        found.append(model(input_ids=tokens[:, start : t + 1], use_cache=False).logits[:, -1:])
    return torch.cat(found, dim=1)


def read_through(model, policy, tokens: Tensor, pieces=(SHORT,)) -> Tensor:
    reader = open_reader(model, policy)
    return torch.cat([reader.read(piece) for piece in tokens.split(list(pieces), dim=1)], dim=1)


@pytest.mark.parametrize("family", RECOMPUTED)
def test_as_one_at_a_time(recomputed, family):
    model, tokens, policy = recomputed[family], text(SHORT, rows=2), Recompute(window=7)
    expected = slowly(model, tokens, 7)
    for pieces in ([SHORT], [1] * SHORT, [5, 1, 9, 11]):
        torch.testing.assert_close(read_through(model, policy, tokens, pieces), expected, atol=TOLERANCE, rtol=0)
    assert float((slowly(model, tokens, 7, off=1) - expected).abs().max()) > 0.05


def test_tokens_that_are_passed_over_are_seen_and_not_encoded(recomputed):
    model, tokens, policy = recomputed["llama"], text(SHORT, rows=2), Recompute(window=7)
    expected = slowly(model, tokens, 7)
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
    """Any division into calls, and any number of logits asked for in each."""
    model = recomputed["llama"]
    tokens = text(SHORT, rows=1)
    expected = slowly(model, tokens, window)
    reader, position = open_reader(model, Recompute(window=window)), 0
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


def test_padding(recomputed):
    model, tokens, mask = recomputed["gpt2"], text(SHORT, rows=3), torch.ones(3, SHORT, dtype=torch.long)
    mask[1, :9] = 0
    mask[2, 12:15] = 0
    mask[2, 24:] = 0
    reader = open_reader(model, Recompute(window=7))
    cuts = [(0, 6), (6, 14), (14, SHORT)]
    found = torch.cat([reader.read(tokens[:, a:b], mask[:, a:b]) for a, b in cuts], dim=1)
    for row in range(3):
        shown = mask[row].bool()
        expected = slowly(model, tokens[row : row + 1, shown], 7)
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


def test_windows_refused(recomputed):
    with pytest.raises(ConfigurationError, match="GPT2LMHeadModel has 64 learned positions and a window has 65 tokens"):
        open_reader(recomputed["gpt2"], Recompute(window=64))
    with pytest.raises(ConfigurationError, match="OPTForCausalLM has 64 learned positions"):
        open_reader(recomputed["opt"], Recompute(window=64))
    with pytest.raises(ConfigurationError, match="SinkLM has 64 learned positions"):
        open_reader(recomputed["learned"], Recompute(window=64))
    open_reader(recomputed["gpt2"], Recompute(window=63)).read(text(66, rows=1))
    open_reader(recomputed["llama"], Recompute(window=80)).read(text(90, rows=1))
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
