"""Every decoder family: the cache follows the published rule of StreamingLLM, and is dense before it is full."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.conftest import TINY
from tests.streaming.decoders import (
    FAMILIES,
    SINKS,
    TOLERANCE,
    WINDOW,
    assert_as_published,
    assert_dense_before_it_is_full,
    backends_of,
    build_decoder,
    decoder,
    encoded_anew,
    gap,
    one_by_one,
    read,
    sliding,
    text,
)
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.errors import UnsupportedModelError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.traits import Rotation, read_rotations

LENGTH = 40
CASES = [(family, backend) for family in FAMILIES for backend in backends_of(family)]


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_as_published(family, backend):
    assert_as_published(decoder(family, backend))


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_dense_before_it_is_full(family, backend):
    assert_dense_before_it_is_full(decoder(family, backend))


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_original_positions_are_a_mask(family, backend):
    """With original positions the stream is the dense model under the policy's mask."""
    model, tokens = build_decoder(family, backend, **sliding(family, LENGTH)), text(LENGTH)
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, positions="original")
    index = torch.arange(LENGTH)
    visible = cache.policy.visible(index[:, None], index).expand(len(tokens), 1, -1, -1)
    mask = visible if backend == "sdpa" else torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        dense = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    assert gap(one_by_one(model, tokens, cache), dense) < TOLERANCE
    cache.reset()
    assert gap(read(model, tokens, cache, pieces=[19, 1, 20]), dense) < TOLERANCE


TOKENS = 40
HEAD = 8
POLICY = SinkWindow(num_sinks=SINKS, window=WINDOW)
FACTORS = [1.0, 1.5, 2.0, 4.0]
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "large_theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32},
        **{"short_factor": FACTORS, "long_factor": [2 * factor for factor in FACTORS]},
    },
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
"""Fields of a llama's ``rope_parameters``; those of ``partial`` are for a model that knows them."""


def of_kind(kind: str, **changes):
    family = "stablelm" if kind == "partial" else "llama"
    return build_decoder(family, rope_parameters=dict(KINDS[kind]), **changes)


def check(model, tokens):
    expected = encoded_anew(model, POLICY, tokens)
    tight = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=4, rebase_at=SINKS + WINDOW + 5)
    assert gap(one_by_one(model, tokens), expected) < TOLERANCE
    assert gap(read(model, tokens, pieces=[19, 1, 1, 19]), expected) < TOLERANCE
    assert gap(one_by_one(model, tokens, tight), expected) < TOLERANCE
    assert tight.table.rebases >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind):
    check(of_kind(kind, num_hidden_layers=1), text(TOKENS))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    """Interleaved pairs, halves, part of the head, no positions at all, a table, other frequencies in sliding layers."""
    changes = {"layer_types": ["sliding_attention"]} if family in ("gemma3", "olmo3", "cohere2", "mimo_v2_flash") else {}
    changes |= {"layer_types": ["full_attention"]} if family in ("gpt_oss", "granite_swa", "qwen3_next") else {}
    changes |= {"attn_layer_indices": [0]} if family == "bamba" else {}
    changes |= {"no_rope_layers": [0]} if family == "smollm3" else {}
    name = "n_layer" if family in ("gptj", "codegen") else "num_hidden_layers"
    check(build_decoder(family, "eager", **{name: 1}, **changes), text(TOKENS))


def test_layers_that_differ():
    model = build_decoder("smollm3")
    rotated, plain = read_rotations(model).layers.values()
    assert isinstance(rotated, Rotation)
    assert plain is None
    same, again = read_rotations(build_decoder("llama")).layers.values()
    assert same is again  # one set of matrices for both
    both = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": KINDS["linear"]}
    sliding, full = read_rotations(build_decoder("gemma3", rope_parameters=both)).layers.values()
    assert sliding.frequencies.tolist() == pytest.approx([100.0 ** -(2 * pair / HEAD) for pair in range(4)])
    assert full.frequencies.tolist() == pytest.approx([1e4 ** -(2 * pair / HEAD) / 4 for pair in range(4)])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_model_that_has_read_a_long_text_before_rotates_by_its_own_frequencies_again(kind):
    """The long text leaves stretched frequencies in the model; a cache, whose positions stay short, must not take them over."""
    fresh, model = of_kind(kind, num_hidden_layers=1), of_kind(kind, num_hidden_layers=1)
    with torch.no_grad():
        model(input_ids=text(150, rows=1), use_cache=False)
    buffers = dict(model.named_buffers())
    assert not torch.equal(buffers["model.rotary_emb.inv_freq"], buffers["model.rotary_emb.original_inv_freq"])
    assert read_rotations(model).layers[0].same_as(read_rotations(fresh).layers[0])
    check(model, text(TOKENS))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("default", None), ("linear", None), ("yarn", None), ("llama3", None), ("dynamic", 64), ("longrope", 32)],
)
def test_where_frequencies_change(kind, limit):
    """dynamic: behind max_position_embeddings; longrope: behind the length of the first training."""
    model = of_kind(kind)
    assert read_rotations(model).limit == limit
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    tokens = text(150, rows=1)
    with torch.no_grad():
        read(model, tokens, cache, pieces=[100, 1, 49])
    assert cache.table.highest_position < (limit or 150)


@torch.no_grad()
def test_frequencies_rounded_by_a_cast():
    """``model.to(bfloat16)`` casts the frequencies too; the model turns by those, and so does the cache."""
    model = build_decoder("llama", rope_parameters={"rope_type": "default", "rope_theta": 3e3})
    exact = read_rotations(model).layers[0].frequencies
    model.to(torch.bfloat16)
    rounded = read_rotations(model).layers[0].frequencies
    assert (rounded == exact.to(torch.bfloat16)).all()
    assert (rounded != exact).any()
    # In float32 again the rounded frequencies stay; nothing but the rotation is under test then.
    model = build_decoder("llama", rope_parameters={"rope_type": "default", "rope_theta": 3e3}, num_hidden_layers=1)
    model.to(torch.bfloat16).to(torch.float32)
    check(model, text(TOKENS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_own_model(dtype):
    torch.manual_seed(0)
    model = SinkLM(SinkLMConfig(**TINY | {"num_hidden_layers": 1}, initializer_range=0.3)).eval().to(dtype)
    tokens, bound = text(TOKENS), 1e-12 if dtype == torch.float64 else TOLERANCE
    expected = encoded_anew(model, POLICY, tokens)
    assert gap(one_by_one(model, tokens), expected) < bound
    assert gap(read(model, tokens, pieces=[19, 1, 20]), expected) < bound


def test_a_turn_by_hand():
    """A quarter turn takes the first coordinate of a pair to the second, and the second to minus the first."""
    rotation = Rotation(torch.tensor([torch.pi / 2], dtype=torch.float64), torch.tensor([0]), torch.tensor([2]), head_dim=3)
    key = torch.tensor([[1.0, 5.0, 3.0]], dtype=torch.float64)
    assert gap(key @ rotation.matrices(torch.tensor(1), torch.float64), torch.tensor([[-3.0, 5.0, 1.0]])) < 1e-15
    assert gap(key @ rotation.matrices(torch.tensor(-1), torch.float64), torch.tensor([[3.0, 5.0, -1.0]])) < 1e-15
    assert gap(key @ rotation.matrices(torch.tensor(4_000_000), torch.float64), key) < 1e-8
    assert rotation.matrices(torch.zeros(2, 3), torch.float32).shape == (2, 3, 3, 3)


def test_a_turn_no_frequency_explains(monkeypatch):
    import transformers.models.llama.modeling_llama as llama

    model = build_decoder("llama")
    native = llama.apply_rotary_pos_emb
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, *a, **b: native(q, k, cos, sin.abs(), *a, **b))
    with pytest.raises(
        UnsupportedModelError, match="layer 0 of LlamaForCausalLM rotates its keys with the position in a way that none"
    ):
        read_rotations(model)


def test_a_failed_probe_leaves_the_model_as_it_was():
    model = build_decoder("gpt2").train()
    with pytest.raises(UnsupportedModelError):
        read_rotations(model)
    assert model.training


STORED = Path(__file__).parent / "peers.safetensors"
"""Written by ``benchmarks/peers/reference.py``, which runs the two packages in environments of their own."""

PEER_SINKS, PEER_WINDOW = 4, 28
"""The peers attend to these and to the token at hand, as we do."""


def make_model() -> LlamaForCausalLM:
    """A Llama whose weights depend on nothing but their names; sharpened, or a wrong position would hardly show."""
    config = LlamaConfig(
        **TINY | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "max_position_embeddings": 1024}
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim == 2:
                factor = 8 if "q_proj" in name or "k_proj" in name else 3 if "v_proj" in name or "o_proj" in name else 1
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02 * factor)
    return model


@pytest.fixture(scope="module")
def stored():
    with safe_open(STORED, "pt") as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())} | {"about": json.loads(file.metadata()["about"])}


def test_what_is_stored(stored):
    assert stored["about"] == {
        "attention_sinks": "transformers 4.34.0",
        "streaming_llm": "transformers 4.33.0",
        "sinks": PEER_SINKS,
        "window": PEER_WINDOW,
    }
    assert torch.equal(stored["attention_sinks"], stored["streaming_llm"])  # one algorithm


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[1] * 160, [40] * 4, [160], [31, 1, 1, 2, 60, 65]], ids=["one", "forty", "all", "ragged"])
def test_logits_are_those_of_the_peers(stored, backend, lengths):
    model = make_model()
    model.set_attn_implementation(backend)
    cache = SinkCache(model, num_sinks=PEER_SINKS, window=PEER_WINDOW, chunk=50)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in stored["tokens"][None].split(lengths, dim=1)]
    # Float32 through two layers with scores of size 3: found 2e-6; another window or position is 1e-2 off.
    torch.testing.assert_close(torch.cat(parts, dim=1)[0], stored["streaming_llm"], atol=2e-5, rtol=0)


def test_it_would_notice_another_window_and_other_positions(stored):
    model = make_model()
    for settings in (
        {"window": PEER_WINDOW + 1},
        {"window": PEER_WINDOW, "positions": "original"},
        {"window": PEER_WINDOW, "num_sinks": 3},
    ):
        cache = SinkCache(model, **{"num_sinks": PEER_SINKS, **settings})
        with torch.no_grad():
            logits = model(stored["tokens"][None], past_key_values=cache).logits[0]
        apart = (logits - stored["streaming_llm"]).abs().amax(dim=-1)
        assert apart[: PEER_SINKS + PEER_WINDOW].max() < 2e-5 or "num_sinks" in settings
        assert apart[-80:].mean() > 1e-3
