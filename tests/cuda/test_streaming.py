"""Bounded caches on the device: the logits of the slow rule, of the CPU, and of steps that are compiled or replayed."""

import copy
import warnings

import pytest
import torch
from tests.architectures.zoo import VOCAB
from tests.streaming.decoders import (
    SINKS,
    TOLERANCE,
    WINDOW,
    build_decoder,
    gap,
    one_by_one,
    read,
    sharpened,
    slow_logits,
    text,
)
from torch._dynamo.utils import counters

from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.host import compile_steps
from sinklab.streaming.reader import open_reader
from sinklab.streaming.state import load_state, save_state
from sinklab.streaming.stream import Stream

LENGTH = 60
"""Five times around a ring of twelve slots."""
FAMILIES = ("llama", "gpt_neox", "qwen3", "gpt_oss", "mistral")

POLICIES = [
    SinkWindow(num_sinks=2, window=9),
    SinkWindow(num_sinks=2, window=9, positions="original"),
    {"name": "window", "window": 9},
    {"name": "blocks", "num_sinks": 2, "block": 4, "blocks": 2},
    {"name": "pinned", "pinned": (0, 3), "window": 9},
    {"name": "recompute", "window": 12},
    {"name": "full"},
]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_published_rule(device, family, backend):
    if family == "gpt_oss" and backend == "sdpa":
        pytest.skip("gpt_oss has no sdpa")
    model, tokens = build_decoder(family, backend), text(LENGTH)
    expected = slow_logits(model, tokens, SINKS, WINDOW)
    model, tokens, expected = model.to(device), tokens.to(device), expected.to(device)
    for settings in ({}, {"chunk": 6, "rebase_at": 30}):
        cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, **settings)
        assert gap(one_by_one(model, tokens, cache), expected) < TOLERANCE
    for pieces in ([LENGTH], [20, 1, 1, 30, 8]):
        cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, chunk=7)
        assert gap(read(model, tokens, cache, pieces=pieces), expected) < TOLERANCE


def read_by(model, tokens, policy, pieces):
    """Logits behind every piece of a text, however the policy is served."""
    reader = open_reader(model, policy)
    return torch.cat([reader.read(piece) for piece in tokens.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_policy_as_on_the_cpu(device, policy):
    """In float64, where an argmax over scores does not hang on a rounding."""
    policy = policies.make(policy) if isinstance(policy, dict) else policy
    model, tokens = build_decoder("llama").double(), text(LENGTH)
    pieces = [20, 1, 1, 5, *[1] * 33]
    expected = read_by(model, tokens, policy, pieces)
    other = copy.deepcopy(model).to(device)
    found = read_by(other, tokens.to(device), policy, pieces)
    assert found.device.type == device.type
    # Angles of the rotary embedding are float32 in transformers, at positions below 64: 64 · 2⁻²⁴ = 4e-6 of scores below 10.
    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integers_as_on_the_cpu(device, kind):
    model, tokens = build_decoder("llama").double(), text(96)
    sizes = {"num_sinks": 2, "window": 31, "chunk": 16, "quantized": kind}

    def logits(model, tokens):
        return read(model, tokens, SinkCache(model, **sizes), pieces=[40, *[1] * 56])

    expected = logits(model, tokens)
    found = logits(copy.deepcopy(model).to(device), tokens.to(device)).cpu()
    # A number just between two steps of the grid may be rounded either way. Few are: the mean hardly moves.
    assert float((found - expected).abs().mean()) <= TOLERANCE


def test_bfloat16_over_the_wrap_around(device):
    """The held keys are rotated anew from float32 masters, so rounding does not add up: late tokens are no worse."""
    model, tokens = build_decoder("llama"), text(400)
    expected = one_by_one(copy.deepcopy(model).to(torch.bfloat16).float(), tokens)
    half = model.to(device, torch.bfloat16)
    found = one_by_one(half, tokens.to(device)).cpu().float()
    assert bool(found.isfinite().all())
    error = (found - expected).flatten(2).norm(dim=2).mean(0) / expected.flatten(2).norm(dim=2).mean(0)
    # Of logits, after two layers with scores of standard deviation near 1 and up to 5: some dozen roundings of 2⁻⁸.
    assert float(error[:100].mean()) <= 24 * 2.0**-8
    assert float(error[-100:].mean()) <= 2 * float(error[:100].mean()) + 2.0**-8


def test_generate(device):
    model, tokens = build_decoder("llama").double(), text(20)
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(tokens, past_key_values=SinkCache(num_sinks=SINKS, window=WINDOW), **options)
    model = model.to(device)
    cache = SinkCache(num_sinks=SINKS, window=WINDOW)
    found = model.generate(tokens.to(device), past_key_values=cache, **options)
    assert torch.equal(found.cpu(), expected)
    assert cache.get_seq_length() == 59
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    padded = {"attention_mask": mask.to(device), "num_beams": 2}
    cache = SinkCache(num_sinks=SINKS, window=WINDOW)
    beams = model.generate(tokens.to(device), past_key_values=cache, **options, **padded)
    model = model.cpu()
    padded["attention_mask"] = mask
    cache = SinkCache(num_sinks=SINKS, window=WINDOW)
    assert torch.equal(beams.cpu(), model.generate(tokens, past_key_values=cache, **options, **padded))


@torch.no_grad()
def test_streams_samples_and_states(device, tmp_path):
    """Greedy tokens are those of the CPU; sampled ones of one seed repeat; a state that was saved goes on bit by bit."""
    torch.manual_seed(0)
    fields = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SinkLM(SinkLMConfig(**fields, intermediate_size=64, bos_token_id=0, eos_token_id=1)).eval().double()
    policy, prompt = SinkWindow(num_sinks=2, window=9), text(20, rows=1)

    def tokens_of(model, **options):
        stream = Stream(model, policy=policy, stop_ids=(), **options)
        stream.feed(prompt)
        return [token.id for token in stream.generate(40)]

    expected = tokens_of(model)
    whole = read(model, prompt, SinkCache(model, num_sinks=2, window=9), pieces=[15, 5])
    model, prompt = model.to(device), prompt.to(device)
    assert tokens_of(model) == expected
    sampled = [tokens_of(model, temperature=1.0, top_k=20, top_p=0.9, seed=seed) for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]
    cache = SinkCache(model, num_sinks=2, window=9)
    first = read(model, prompt[:, :15], cache)
    save_state(cache, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors", model).read(prompt[:, 15:])
    assert torch.equal(again, read(model, prompt[:, 15:], cache))
    # Angles are float32, logits below 1.
    torch.testing.assert_close(torch.cat([first, again], 1).cpu(), whole, atol=1e-5, rtol=0)


def logits_of(model, tokens, first=10, **settings):
    cache = SinkCache(model, num_sinks=4, window=20, **settings)
    with torch.no_grad():
        # A graph that is replayed writes its outputs to one place.
        parts = [
            model(part, past_key_values=cache).logits.clone()
            for part in (tokens[:, :first], *tokens[:, first:].split(1, dim=1))
        ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps(cuda, mode, dtype):
    """One graph for all tokens, of every cache, also as a CUDA graph, whose inputs must stay where they are."""
    counters.clear()
    model = sharpened().to(cuda)
    tokens = torch.randint(5, 32, (2, 80), generator=torch.Generator().manual_seed(0)).to(cuda)
    model.to(dtype)
    expected = logits_of(model, tokens)
    # What a step of this dtype is from float32 with the same weights: fused operations round elsewhere, not more.
    exact = logits_of(copy.deepcopy(model).float(), tokens)
    compile_steps(model, mode=mode)
    first, second = logits_of(model, tokens), logits_of(model, tokens)
    assert counters["stats"]["unique_graphs"] == 1
    if mode == "reduce-overhead":
        assert not counters["inductor"]["cudagraph_skips"]
    for found in (first, second):
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, atol=3e-4, rtol=0)  # as in tests/streaming/test_static.py
        else:
            error, own = ((one.float() - exact).norm() / exact.norm() for one in (found, expected))
            assert float(error) <= 2 * float(own) + 2.0**-8


def test_layers_do_not_wait_for_the_device(cuda):
    """What a step asks the device is asked once for all layers, when it is planned: a wait in every layer would cost more than
    the layer."""
    waits = []
    for layers in (2, 6):
        model = build_decoder("llama", num_hidden_layers=layers).to(cuda)
        cache = SinkCache(model, num_sinks=4, window=20)
        token = torch.full((1, 1), 7, device=cuda)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(40):
                model(token, past_key_values=cache)
            torch.cuda.synchronize()
            caught.clear()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model(token, past_key_values=cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(warning.message) for warning in caught))
    assert waits[1] <= waits[0] <= 8, waits
