"""End to end: measure() on a 12-layer Llama with random weights at 4,096 tokens against the model's own forward."""

from __future__ import annotations

import torch
from _timing import Bar, best_times, exit_with
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import measure as measure_model
from sinklab.models.loading import wrap_model

PROBES = ("sink_rate", "attention_received", "entropy")
LENGTH = 4096


@torch.no_grad()
def measure() -> list[Bar]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=12,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
    )
    loaded = wrap_model(LlamaForCausalLM._from_config(config, attn_implementation="sdpa"), name="llama, random weights")
    tokens = torch.randint(4096, (1, LENGTH))

    def forward() -> object:
        return loaded.model(input_ids=tokens, use_cache=False, logits_to_keep=1)

    def measured() -> object:
        return measure_model(loaded, probes=PROBES, corpus="random_tokens", seq_len=LENGTH, samples=1, bos="none")

    times = best_times({"forward": forward, "measure": measured}, 3)
    what = f"measure() with {', '.join(PROBES)} ÷ forward (12 layers, T = {LENGTH})"
    return [Bar("end to end", what, times["measure"] / times["forward"], "<=", 1.5)]


if __name__ == "__main__":
    exit_with(measure)
