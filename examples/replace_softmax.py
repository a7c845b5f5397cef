"""Put another attention operation into a transformers model by name, and see that rows no longer have to sum to one."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import attend
from sinklab.attention.seam import register_operation
from sinklab.operations.sigmoid import Sigmoid
from sinklab.probes.attention_received import AttentionReceived


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 100, (8, 32))
    # -log(seq_len), so that the mass of the last row starts near one (Ramapuram et al. 2024).
    name = register_operation(Sigmoid(bias=-3.4657))
    for implementation in ("sdpa", name):
        model.set_attn_implementation(implementation)
        with torch.no_grad(), attend(model, probes=[AttentionReceived()]) as session:
            model(input_ids=tokens)
        received = session.table().query("layer == 0 and head == 0").sort_values("key_position")
        # A key at position k is seen by seq_len - k queries, so the mass of all rows is the sum of mean weight × queries.
        mass = (received["value"] * (tokens.shape[1] - received["key_position"])).sum() / tokens.shape[1]
        print(f"{implementation:<16} mean mass of a row: {mass:.3f}")


if __name__ == "__main__":
    main()
