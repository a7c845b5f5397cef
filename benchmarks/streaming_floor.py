"""A step in a cache of 4,096 against the memory floor, and against the same step where the ring is kept as integers.

The floor is the bytes that a step cannot but touch, weights and held keys and values, divided by the rate at which this process
copies memory, measured in turn with the steps; a copy touches its bytes twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _peers import make_llama
from _timing import Bar, best_times, exit_with
from torch import Tensor
from transformers import LlamaForCausalLM

from sinklab.attention.operation import Inputs
from sinklab.attention.paths import decode
from sinklab.attention.seam import register_operation
from sinklab.operations.softmax import Softmax
from sinklab.streaming.cache import SinkCache

HELD, SINKS, STEPS = 4096, 4, 5
SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 8}
COPIED = 2**25


@torch.no_grad()
def measure() -> list[Bar]:
    """Bars of a whole step, of its attention alone, and of int8 and int4."""
    model = make_llama(sharpened=2.0, **SIZES)
    text = torch.randint(0, 1024, (1, HELD + 1), generator=torch.Generator().manual_seed(1))
    caches = {kind: filled(model, text, kind) for kind in (None, "int8", "int4")}
    model.set_attn_implementation(register_operation(Softmax()))
    source, target = torch.randn(2, COPIED).unbind()
    layers = [(layer.keys, layer.values) for layer in caches[None].layers]
    query = torch.randn(1, SIZES["num_attention_heads"], 1, SIZES["hidden_size"] // SIZES["num_attention_heads"])

    def attend() -> list[Tensor]:
        return [
            decode.head_outputs(Softmax(), Inputs(query, keys, values, None, False, query.shape[-1] ** -0.5))
            for keys, values in layers
        ]

    times = best_times(
        {
            "copy": lambda: target.copy_(source),
            "attention": attend,
            **{str(kind): steps(model, cache) for kind, cache in caches.items()},
        },
        rounds=15,
    )
    rate = 2 * source.nbytes / times["copy"]
    held = sum(keys.nbytes + values.nbytes for keys, values in layers)
    weights = sum(weight.nbytes for name, weight in model.named_parameters() if "embed_tokens" not in name)
    step = times["None"] / STEPS
    print(
        f"copy {rate / 1e9:.1f} GB/s; {held / 2**20:.0f} MiB held, {weights / 2**20:.0f} MiB of weights; ms: "
        f"step {step * 1e3:.2f}, its attention {times['attention'] * 1e3:.2f}, "
        + ", ".join(f"{kind} {times[kind] / STEPS * 1e3:.2f}" for kind in ("int8", "int4")),
        file=sys.stderr,
    )
    label = f"Llama 4 × 512, {HELD} tokens held, float32"
    return [
        Bar("floor", f"{label}: a step ÷ its memory floor", step / ((held + weights) / rate), "<=", 1.25),
        Bar("floor", f"{label}: attention of a step ÷ its memory floor", times["attention"] / (held / rate), "<=", 1.25),
        *(
            Bar("floor", f"{label}: a step with {kind} ÷ without", times[kind] / times["None"], "<=", 1.1)
            for kind in ("int8", "int4")
        ),
    ]


def filled(model: LlamaForCausalLM, text: Tensor, kind: str | None) -> SinkCache:
    """A cache in which every slot is taken."""
    cache = SinkCache(model, num_sinks=SINKS, window=HELD - SINKS - 1, quantized=kind)
    model(text, past_key_values=cache, logits_to_keep=1)
    return cache


def steps(model: LlamaForCausalLM, cache: SinkCache) -> Callable[[], None]:
    """Some steps."""
    token = torch.tensor([[1]])

    def run() -> None:
        for _ in range(STEPS):
            model(token, past_key_values=cache)

    return run


if __name__ == "__main__":
    exit_with(measure)
