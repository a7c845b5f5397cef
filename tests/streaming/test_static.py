"""Compiled steps: one graph for all tokens, whatever slot and turn they have, and the logits of steps that are not compiled."""

import pytest
import torch
from tests.conftest import real
from tests.streaming.decoders import sharpened
from torch._dynamo.utils import counters

from sinklab import load_model
from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.streaming.cache import ExportableStep, SinkCache
from sinklab.streaming.host import compile_steps

LENGTH = 80
"""More than twice around a ring of 21 slots."""


@pytest.fixture(autouse=True)
def no_other_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def logits_of(model, first: int, batch: int = 2, **settings):
    """Logits of a text read as a prompt of ``first`` tokens and one by one; graphs that there were behind every token."""
    settings = {"num_sinks": 4, "window": 20, **settings}
    cache = SinkCache(model, **settings)
    tokens = torch.randint(5, 32, (batch, LENGTH), generator=torch.Generator().manual_seed(0))
    logits, graphs = [], []
    with torch.no_grad():
        for part in (tokens[:, :first], *tokens[:, first:].split(1, dim=1)):
            logits.append(model(part, past_key_values=cache).logits)
            graphs.append(counters["stats"]["unique_graphs"])
    return torch.cat(logits, dim=1), graphs


@pytest.mark.parametrize(
    ("name", "backend", "first", "settings"),
    [
        ("llama", "sdpa", 10, {}),
        ("llama", "eager", 10, {}),
        ("llama", "sdpa", 1, {}),  # the pinned tokens come in one by one
        ("llama", "sdpa", 60, {"rebase_at": 60, "chunk": 8}),
        ("llama", "sdpa", 10, {"positions": "original"}),
        ("llama", "sdpa", 10, {"num_sinks": 0}),
        ("gpt_neox", "sdpa", 10, {}),  # partial rotary
        ("deepseek_v3", "sdpa", 10, {}),  # latents
        ("bamba", "sdpa", 10, {}),  # states beside the keys
    ],
)
def test_one_graph_and_the_same_logits(name, backend, first, settings):
    model = sharpened(name, backend, factor=8.0).double()
    expected, _ = logits_of(model, first, **settings)
    compile_steps(model, backend="eager")  # the graph itself; what a backend makes of it is torch's
    found, graphs = logits_of(model, first, **settings)
    # The same operations, but for masked keys, which add zeros, and an order of sums. In float64, since one float32 rounding of
    # sharpened scores, which reach 900, is 6e-5, and which of them are rounded up depends on the processor.
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert graphs[-1] == 1
    assert graphs[2:] == [1] * len(graphs[2:])  # the first token allocates and is not compiled, the second is
    again, graphs = logits_of(model, first, **settings)  # another cache of the same shapes
    assert graphs[-1] == 1
    assert torch.equal(again, found)


def test_our_own_model():
    """It asks the cache for its length, and its decoder is the model itself."""
    torch.manual_seed(0)
    config = SinkLMConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    model = SinkLM(config).eval()
    expected, _ = logits_of(model, 10)
    compile_steps(model, backend="eager")
    found, graphs = logits_of(model, 10)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # as above
    assert graphs[-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "decoder"])
def test_a_model_compiled_as_any_other(what):
    """Planning stays outside of the graphs, which are broken there; behind the first steps there are no new ones."""
    model = sharpened(factor=8.0)
    expected, _ = logits_of(model, 10)
    torch._dynamo.reset()
    (model if what == "model" else model.base_model).compile(backend="eager")
    found, graphs = logits_of(model, 10)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert graphs[3:] == graphs[3:4] * len(graphs[3:])


def test_prompts_padded_batches_and_forwards_without_a_cache_are_not_compiled():
    model = sharpened(factor=8.0)
    tokens = torch.randint(5, 32, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :3] = 0

    def read():
        cache = SinkCache(model, num_sinks=4, window=20)
        parts = [model(tokens[:, :20], attention_mask=mask[:, :20], past_key_values=cache).logits]
        parts += [
            model(tokens[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache).logits for n in range(20, 30)
        ]
        return torch.cat(parts, dim=1)

    with torch.no_grad():
        expected, without = read(), model(tokens).logits
        compile_steps(model, backend="eager")
        assert torch.equal(read(), expected)
        assert torch.equal(model(tokens).logits, without)
    assert not counters["stats"]["unique_graphs"]


def test_steps_are_compiled_once():
    model = sharpened(factor=8.0)
    compile_steps(model)
    with pytest.raises(ConfigurationError, match="the steps of this LlamaForCausalLM are compiled already"):
        compile_steps(model)


@pytest.mark.slow
def test_inductor():
    model = sharpened(factor=8.0)
    expected, _ = logits_of(model, 10)
    compile_steps(model)
    found, graphs = logits_of(model, 10)
    # Fused float32 operations round in another order; so do those of sdpa and eager, whose logits of size 1 are 9e-5
    # apart here, and both are 8e-5 from float64.
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=0)
    assert graphs[-1] == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "backend", "settings"),
    [
        ("llama", "eager", {"rebase_at": 60, "chunk": 8}),
        ("gpt_neox", "sdpa", {"num_sinks": 0}),
        ("deepseek_v3", "sdpa", {"positions": "original"}),
        ("embedded:softmax", "sdpa", {}),
        pytest.param("smollm2-135m", "sdpa", {}, marks=[pytest.mark.real, pytest.mark.slow]),
    ],
)
def test_an_exported_step(name, backend, settings):
    """The logits of eager steps, of a text and of the next one."""
    given = {"smollm2-135m": lambda: real(name), "embedded:softmax": lambda: name}.get(name)
    model = (load_model(given()).model if given else sharpened(name, backend, factor=8.0)).double()
    expected, _ = logits_of(model, 1, batch=1, **settings)
    cache = SinkCache(model, **{"num_sinks": 4, "window": 20, **settings})
    tokens = torch.randint(5, 32, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        example = {"input_ids": tokens[:, :1], "cache_position": torch.tensor([0])}
        model(tokens[:, :3], **cache.keyword)
        step = torch.export.export(ExportableStep(model, cache), (), example).module()
        for _ in range(2):
            found = [step(input_ids=ids, cache_position=torch.tensor([at])) for at, ids in enumerate(tokens.split(1, dim=1))]
            torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-9, rtol=0)  # as above


def test_what_cannot_be_exported():
    model = sharpened()
    with pytest.raises(ConfigurationError, match="that has read a token or more, without padding, in full precision"):
        ExportableStep(model, SinkCache(model))
