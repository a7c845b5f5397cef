"""A long prompt into a bounded cache with sinks, against the model's own sliding-window attention over the same text.

The model has sliding windows of 1,024 tokens; its own cache drops what they do not reach, and it reads the text in pieces too,
since a mask of 32,768 by 32,768 would be most of the work. Both ways have the size of pieces that suits them best.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _timing import Bar, best_times, exit_with
from torch import Tensor
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from sinklab.streaming.cache import SinkCache

LENGTH, HELD, SINKS = 32_768, 1024, 4
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 6, "vocab_size": 1024, "head_dim": 64, "max_position_embeddings": 1 << 17}
PIECES = (128, 256, 512)


@torch.no_grad()
def measure() -> list[Bar]:
    """One bar; tokens a second of every size of pieces go to standard error.

    Raises:
        AssertionError: a cache without sinks and the model's own window differ.
    """
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(sliding_window=HELD, **SIZES)).eval()
    text = torch.randint(0, SIZES["vocab_size"], (1, LENGTH), generator=torch.Generator().manual_seed(1))
    require_equal(model, text[:, : 2 * HELD + 8])
    candidates: dict[str, Callable[[], Tensor]] = {}
    for piece in PIECES:
        candidates[f"ours, {piece}"] = lambda piece=piece: read_ours(model, text, piece)
        candidates[f"own, {piece}"] = lambda piece=piece: read_own(model, text, piece)
    times = best_times(candidates, rounds=2)
    said = ", ".join(f"{name} {LENGTH / taken:.0f}" for name, taken in times.items())
    print(f"{LENGTH} tokens into {HELD}: tokens a second: {said}", file=sys.stderr)
    ours, own = (min(taken for name, taken in times.items() if name.startswith(who)) for who in ("ours", "own"))
    what = f"Llama-like 6 × 384, prompt of {LENGTH} tokens into {HELD} with {SINKS} sinks: speed ÷ that of its own window"
    return [Bar("prefill", what, own / ours, ">=", 0.8)]


def read_ours(model: MistralForCausalLM, text: Tensor, piece: int, sinks: int = SINKS) -> Tensor:
    """Logits of the last token."""
    cache = SinkCache(model, num_sinks=sinks, window=HELD - 1 - sinks, chunk=piece)
    return model(text, past_key_values=cache, logits_to_keep=1).logits


def read_own(model: MistralForCausalLM, text: Tensor, piece: int) -> Tensor:
    """Logits of the last token under the model's own windows."""
    cache = DynamicCache(config=model.config)
    for part in text.split(piece, dim=1):
        logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    return logits


def require_equal(model: MistralForCausalLM, text: Tensor) -> None:
    """Without sinks the logits are those of the model's own windows; with them they are others."""
    own = read_own(model, text, 256)
    apart, with_sinks = (float((read_ours(model, text, 256, sinks) - own).abs().max()) for sinks in (0, SINKS))
    if not apart <= 1e-4 < with_sinks:
        raise AssertionError(f"logits are {apart:.1e} apart without sinks, {with_sinks:.1e} with them; nothing is timed")


if __name__ == "__main__":
    exit_with(measure)
