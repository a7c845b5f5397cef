"""One token of a whole model in a full cache: against recomputation, other caches, and itself a million tokens later."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _peers import make_llama
from _timing import Bar, best_times, exit_with
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaForCausalLM, StaticCache

from sinklab.attention.seam import register_operation
from sinklab.operations.softmax import Softmax
from sinklab.streaming.cache import SinkCache

SINKS, HELD = 4, 1024
STEPS = 10
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 6}


@torch.no_grad()
def measure() -> list[Bar]:
    """Bars of a model of 11 million parameters, 1,024 tokens held, float32 and bfloat16."""
    return [*against_others(), *far_away()]


def against_others() -> list[Bar]:
    """Recomputation of the window, and a static and a growing cache of the same size."""
    bars, text, softmax = [], prompt(), register_operation(Softmax())
    for dtype in (torch.float32, torch.bfloat16):
        model = model_in(dtype)
        static = StaticCache(config=model.config, max_cache_len=HELD + 1)
        dynamic = DynamicCache(config=model.config)
        ours = SinkCache(model, num_sinks=SINKS, window=HELD - SINKS)
        for cache in (static, dynamic, ours):
            model(text[:, :HELD], past_key_values=cache)

        def in_static(static: StaticCache = static, model: LlamaForCausalLM = model) -> None:
            for _ in range(STEPS):
                model(TOKEN, past_key_values=static)
                for layer in static.layers:
                    layer.cumulative_length.sub_(1)

        def in_dynamic(dynamic: DynamicCache = dynamic, model: LlamaForCausalLM = model) -> None:
            for _ in range(STEPS):
                model(TOKEN, past_key_values=dynamic)
                dynamic.crop(-1)

        def recompute(model: LlamaForCausalLM = model, text: Tensor = text) -> Tensor:
            return model(text[:, : HELD + 1], use_cache=False, logits_to_keep=1).logits

        times = best_times(
            {
                "ours": with_backend(model, softmax, steps(model, ours)),
                "static": with_backend(model, "sdpa", in_static),
                "dynamic": with_backend(model, "sdpa", in_dynamic),
                "ours, sdpa": with_backend(model, "sdpa", steps(model, ours)),
            },
            rounds=15,
        )
        again = best_times({name: with_backend(model, name, recompute) for name in ("sdpa", "eager", softmax)}, rounds=4)
        label = f"Llama 6 × 384, {HELD} tokens held, {str(dtype).removeprefix('torch.')}"
        found = {
            **{key: value / STEPS for key, value in times.items()},
            **{f"again, {key}": value for key, value in again.items()},
        }
        print(f"{label}: ms: " + ", ".join(f"{key} {value * 1e3:.2f}" for key, value in found.items()), file=sys.stderr)
        bars += [
            Bar("11", f"{label}: recomputation of the window ÷ ours", min(again.values()) * STEPS / times["ours"], ">=", 30.0),
            Bar("11", f"{label}: ours ÷ StaticCache of that size", times["ours"] / times["static"], "<=", 1.3),
            Bar("11", f"{label}: ours, with sdpa ÷ StaticCache of that size", times["ours, sdpa"] / times["static"], "<=", 1.3),
            Bar(
                "11",
                f"{label}: ours, with sdpa ÷ DynamicCache of that size",
                times["ours, sdpa"] / times["dynamic"],
                "<=",
                1.05,
            ),
        ]
    return bars


TOKEN = torch.tensor([[1]])


def steps(model: LlamaForCausalLM, cache: Cache) -> Callable[[], None]:
    """Some steps."""

    def run() -> None:
        for _ in range(STEPS):
            model(TOKEN, past_key_values=cache)

    return run


def with_backend(model: LlamaForCausalLM, backend: str, run: Callable[[], None]) -> Callable[[], None]:
    """``run`` after the model has been switched."""

    def switched() -> None:
        model.set_attn_implementation(backend)
        run()

    return switched


def far_away() -> list[Bar]:
    """The same cache near the beginning and a million tokens on: as fast, and with the same logits."""
    model = model_in(torch.float32)
    caches = {}
    logits = {}
    text = prompt()
    for position in (2048, 1_000_000):
        cache = SinkCache(model, num_sinks=SINKS, window=HELD - SINKS)
        for start in range(0, 2048, 512):
            model(text[:, start : start + 512], past_key_values=cache)
        ring = HELD - SINKS + 1
        advance(cache, (position - 2048) // ring * ring)
        logits[position] = torch.cat(
            [model(text[:, 2048 + n : 2049 + n], past_key_values=cache).logits for n in range(20)], dim=1
        )
        caches[position] = cache
    times = best_times({str(position): steps(model, cache) for position, cache in caches.items()}, rounds=25)
    apart = (logits[2048] - logits[1_000_000]).abs().max().item()
    ratio = times["1000000"] / times["2048"]
    label = f"Llama 6 × 384, {HELD} tokens held, float32: position 1,000,000"
    return [
        Bar("11", f"{label} ÷ position 2,048", ratio, "<=", 1.05),
        Bar("11", f"{label} ÷ position 2,048", ratio, ">=", 0.95),
        Bar("12", f"{label}, logits against those at 2,048", apart, "<=", 1e-4, ""),
    ]


def advance(cache: SinkCache, tokens: int) -> None:
    """Let the table say that so many more tokens, whole turns of the ring, have gone by, of which the last are those held."""
    table = cache.table
    pinned = len(table.pinned)
    table.seen = table.seen + tokens
    table.index[:, pinned:] += tokens
    table.columns += tokens
    table.base += tokens  # positions are counted from there: those of the keys in the ring stay


def model_in(dtype: torch.dtype) -> LlamaForCausalLM:
    """The model; frequencies stay float32, as from_pretrained() has it."""
    model = make_llama(sharpened=2.0, **SIZES)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model = model.to(dtype)
    model.model.rotary_emb.inv_freq = frequencies
    return model


def prompt() -> Tensor:
    """A row of tokens."""
    return torch.randint(0, 1024, (1, 2100), generator=torch.Generator().manual_seed(1))


if __name__ == "__main__":
    exit_with(measure)
