"""Measure models that sinklab has never heard of: a decoder and an image model, with random weights, on inputs of their own."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from sinklab import attend
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.entropy import Entropy


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=100, **shape)).eval()
    tokens = torch.randint(0, 100, (8, 32))
    vit = ViTModel(ViTConfig(image_size=32, patch_size=8, **shape)).eval()
    images = torch.randn(8, 3, 32, 32)

    for model, inputs in ((llama, {"input_ids": tokens}), (vit, {"pixel_values": images})):
        with torch.no_grad(), attend(model, probes=[AttentionReceived(), Entropy()]) as session:
            model(**inputs)
        table = session.table()
        first = table[(table["metric"] == "mean_weight") & (table["key_position"] == 0)]
        entropy = table[table["metric"] == "entropy"]
        print(session)
        print(f"  weight on the first position, mean over heads: {first['value'].mean():.4f}")
        print(f"  entropy of the rows, mean over heads: {entropy['value'].mean():.3f} nats")


if __name__ == "__main__":
    main()
