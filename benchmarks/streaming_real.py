"""Streaming SmolLM2-135M: one token of it in full caches of three sizes, and a prompt of 8,192 tokens.

python benchmarks/streaming_real.py [--models build/models]      (make models first)

The pattern of StreamingLLM and attention_sinks concatenates what is held and rotates it anew for every token. The floor of a
step is what torch takes for its products of one row with all weights, which is more than to read them, and the reading of what
is held. The model's own windowed reading is that of Mistral's code with the same weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _timing import Bar, best_times, main
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, MistralForCausalLM, StaticCache
from transformers.models.llama.modeling_llama import rotate_half

from sinklab.streaming.cache import SinkCache

SINKS, STEPS = 4, 5
LENGTH, WINDOW, PIECE = 8192, 1024, 512
COPIED = 2**25
PATTERN = {256: 1.5, 1024: 1.5, 4096: 4.0}
"""Tokens held, and how many times as fast as the pattern that rotates anew a step is to be."""
TOKEN = torch.tensor([[1]])


class Pattern(DynamicCache):
    """A full cache that drops the oldest token behind its sinks, turns the keys that follow it back by one and appends."""

    def __init__(self, model: Any) -> None:
        super().__init__(config=model.config)
        angles = model.model.rotary_emb.inv_freq.repeat(2)
        self.cosines, self.sines = angles.cos(), -angles.sin()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if key_states.shape[2] > 1:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        behind = layer.keys[:, :, SINKS + 1 :]
        turned = behind * self.cosines + rotate_half(behind) * self.sines
        layer.keys = torch.cat((layer.keys[:, :, :SINKS], turned, key_states), dim=2)
        layer.values = torch.cat((layer.values[:, :, :SINKS], layer.values[:, :, SINKS + 1 :], value_states), dim=2)
        return layer.keys, layer.values


@torch.no_grad()
def steps(path: str, held: int) -> list[Bar]:
    """Bars of one step with ``held`` tokens, one thread, float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = torch.randint(0, 1000, (1, held), generator=torch.Generator().manual_seed(1))
    own = {kind: SinkCache(model, num_sinks=SINKS, window=held - SINKS, quantized=kind) for kind in (None, "int8", "int4")}
    dynamic, pattern = DynamicCache(config=model.config), Pattern(model)
    static = StaticCache(config=model.config, max_cache_len=held + 1)
    for cache in (*own.values(), dynamic, pattern, static):
        model(text, past_key_values=cache, logits_to_keep=1)
    source, target = torch.randn(2, COPIED).unbind()
    rows = [(torch.randn(1, part.in_features), part) for part in model.modules() if isinstance(part, torch.nn.Linear)]

    def repeat(cache: Cache, after: Callable[[], object] | None = None, **given: Tensor) -> Callable[[], None]:
        def run() -> None:
            for _ in range(STEPS):
                model(TOKEN, past_key_values=cache, **given)
                if after:
                    after()

        return run

    def one_back() -> None:
        for layer in static.layers:
            layer.cumulative_length.sub_(1)

    times = best_times(
        {
            "copy": lambda: target.copy_(source),
            "products": lambda: [part(row) for _ in range(STEPS) for row, part in rows],
            "ours": repeat(own[None]),
            **{kind: repeat(own[kind]) for kind in ("int8", "int4")},
            "dynamic": repeat(dynamic, lambda: dynamic.crop(-1)),
            "static": repeat(static, one_back),
            "pattern": repeat(pattern, position_ids=torch.tensor([[held - 1]])),
        },
        rounds=8,
    )
    rate = 2 * source.nbytes / times.pop("copy")
    held_in_memory = sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers) / rate
    weights = sum(weight.nbytes for weight in model.parameters()) / rate  # the embeddings are the head
    took = {name: taken / STEPS for name, taken in times.items()}
    said = ", ".join(f"{name} {1e3 * one:.1f}" for name, one in took.items())
    floors = f"memory alone: weights {1e3 * weights:.1f}, held {1e3 * held_in_memory:.1f}"
    print(f"{held} held, ms a token: {said}; {floors}", file=sys.stderr)
    label, ours = f"SmolLM2-135M, {held:,} tokens held, float32:", took["ours"]
    return [
        Bar("streaming", f"{label} tokens a second ÷ those of DynamicCache at that size", took["dynamic"] / ours, ">=", 1.0),
        Bar("streaming", f"{label} tokens a second ÷ those of StaticCache", took["static"] / ours, ">=", 1.0),
        Bar("streaming", f"{label} the pattern that rotates anew ÷ ours", took["pattern"] / ours, ">=", PATTERN[held]),
        Bar("streaming", f"{label} a step ÷ its products and keys", ours / (took["products"] + held_in_memory), "<=", 1.25),
        *(Bar("streaming", f"{label} a step in {kind} ÷ without", took[kind] / ours, "<=", 1.2) for kind in ("int8", "int4")),
    ]  # fmt: skip


@torch.no_grad()
def prompt(path: str) -> Bar:
    """Speed of a prompt into a bounded cache over that of the model's own windows."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    windowed = MistralForCausalLM.from_pretrained(path, dtype=torch.float32, sliding_window=WINDOW)
    text = torch.randint(0, 1000, (1, LENGTH), generator=torch.Generator().manual_seed(1))

    def ours() -> None:
        cache = SinkCache(model, num_sinks=SINKS, window=WINDOW - 1 - SINKS, chunk=PIECE)
        model(text, past_key_values=cache, logits_to_keep=1)

    def own() -> None:
        cache = DynamicCache(config=windowed.config)
        for part in text.split(PIECE, dim=1):
            windowed(part, past_key_values=cache, logits_to_keep=1)

    times = best_times({"ours": ours, "own": own}, rounds=1)
    what = f"SmolLM2-135M, prompt of {LENGTH:,} tokens into {WINDOW:,}: speed ÷ that of its own window"
    return Bar("streaming", what, times["own"] / times["ours"], ">=", 0.9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=Path, default=Path("build/models"), help="what make models has left")
    path = str(parser.parse_args().models / "smollm2-135m")
    sys.exit(main(lambda: [*(bar for held in PATTERN for bar in steps(path, held)), prompt(path)]))
