"""How the work of studies grows: exponents of CPU time in samples, tokens, layers and heads, from three sizes each.

``audit`` without its section on caches and ``cache`` measure random Llamas; ``causes``, whose heads must have something to
say, the embedded model. An exponent is that of what a larger size adds: what loading and pages take, whatever the size, does
not count.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import Bar, best_times, exit_with
from transformers import LlamaConfig, LlamaForCausalLM

import sinklab
from sinklab.models.loading import LoadedModel, load_model, wrap_model
from sinklab.studies.arguments import Output
from sinklab.studies.cache.cache import compare_policies

HEADS = ["5.0", "2.0", "4.0", "3.0", "5.1", "2.1", "4.1", "3.1"]
"""Two, four and eight of which lie equally deep: behind a lower head more is run anew."""


def llama(layers: int = 4, heads: int = 4) -> LoadedModel:
    """A random model that reads as the embedded one does; its width grows with its heads, up to the layer's own products."""
    torch.manual_seed(0)
    tokenizer = load_model("embedded:softmax").tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=32, max_position_embeddings=4096, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    return wrap_model(LlamaForCausalLM(config), tokenizer, name="random")


def audit(*, samples: int = 64, tokens: int = 64, layers: int = 4, heads: int = 4) -> Callable[[], object]:
    model = llama(layers, heads)
    return lambda: sinklab.audit(model, corpus="python_source", samples=samples, seq_len=tokens, cache=False)


def cache(*, texts: int = 1, tokens: int = 512, layers: int = 4) -> Callable[[], object]:
    model = llama(layers)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            compare_policies(
                model, policies=["sink_window"], windows=[64], sinks=[4], tokens=tokens, documents=texts,
                output=Output(out=str(Path(folder, "cache"))),
            )  # fmt: skip

    return run


def causes(*, texts: int = 32, tokens: int = 64, heads: int = 2) -> Callable[[], object]:
    chosen = HEADS[:heads]
    return lambda: sinklab.find_causes(
        "embedded:softmax", heads=chosen, domains=["python_source"], texts=texts, seq_len=tokens, sink=0
    )


GROWTH: dict[tuple[str, str], tuple[Callable[..., Callable[[], object]], tuple[int, int, int], float]] = {
    ("audit", "samples"): (audit, (64, 256, 1024), 1.0),
    ("audit", "tokens"): (audit, (64, 128, 256), 1.3),
    ("audit", "layers"): (audit, (4, 16, 64), 1.0),
    ("audit", "heads"): (audit, (4, 16, 64), 1.0),
    ("cache", "texts"): (cache, (2, 8, 32), 1.0),
    ("cache", "tokens"): (cache, (512, 2048, 8192), 1.3),
    ("cache", "layers"): (cache, (4, 8, 16), 1.0),
    ("causes", "texts"): (causes, (32, 64, 128), 1.0),
    ("causes", "tokens"): (causes, (64, 128, 256), 1.3),
    ("causes", "heads"): (causes, (2, 4, 8), 1.0),
}
"""Study and what grows → how it runs, the sizes, and the exponent that it may have."""

NOISE = 0.1
"""By which exponents of the same work differ from run to run."""


def exponent(make: Callable[..., Callable[[], object]], size: str, sizes: tuple[int, int, int]) -> float:
    """How the CPU time between the sizes grows: 1 where twice as much takes twice as long."""
    runs = {str(value): make(**{size: value}) for value in sizes}
    seconds = list(best_times(runs, rounds=3).values())
    small, middle, large = sizes
    ratio = (seconds[2] - seconds[0]) / max(seconds[1] - seconds[0], 1e-9)
    # For a + b·size^e the ratio of what is added is (r^2e - 1) / (r^e - 1) = r^e + 1 at equal steps r.
    assert large * small == middle * middle, "sizes are equal steps"
    return math.log(max(ratio - 1, 1e-9)) / math.log(middle / small)


def measure() -> list[Bar]:
    torch.set_num_threads(1)
    return [
        Bar("growth", f"exponent of `{study}` in {size}, {sizes[0]:,} to {sizes[2]:,}", exponent(make, size, sizes), "<=",
            limit + NOISE, "")
        for (study, size), (make, sizes, limit) in GROWTH.items()
    ]  # fmt: skip


if __name__ == "__main__":
    exit_with(measure)
