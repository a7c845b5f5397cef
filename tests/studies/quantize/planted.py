"""Models with a known answer: one-hot bigrams in which one neuron, at BOS alone, can be made a spike without any effect."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.corpora.samples import Samples
from sinklab.models.loading import LoadedModel, wrap_model

TOKENS = 32
"""Size of the vocabulary, 0 being BOS, of the hidden state, and of the feed-forward map: one coordinate each."""


@torch.no_grad()
def bigram(*, spike: int = 1, sink: bool = True) -> LoadedModel:
    """A Llama that predicts ``token + 1`` with its first feed-forward map; its attention writes nothing."""
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=TOKENS, intermediate_size=TOKENS, num_hidden_layers=2, num_attention_heads=2,
        head_dim=16, max_position_embeddings=64, rope_theta=1e6, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(TOKENS))
    first = model.model.layers[0]
    if sink:
        # The slowest pair of a rotary head hardly turns within a text: all queries point there, and the key of BOS alone.
        for head in range(2):
            first.self_attn.q_proj.weight[16 * head + 7] = 1.0
            first.self_attn.k_proj.weight[16 * head + 7, 0] = 5.0
    first.mlp.gate_proj.weight.copy_(torch.eye(TOKENS))
    first.mlp.up_proj.weight.copy_(torch.eye(TOKENS))
    for token in range(TOKENS):
        first.mlp.down_proj.weight[(token + 1) % TOKENS, token] = 0.25
    first.mlp.up_proj.weight[0] *= spike
    first.mlp.down_proj.weight[:, 0] /= spike
    model.lm_head.weight.copy_(1.5 * torch.eye(TOKENS))
    return wrap_model(model, name="planted")


def rows(samples: int, length: int = 24, seed: int = 0) -> Samples:
    """Texts that begin with BOS and follow the rule but for one jump in three, so that no two are alike and losses vary."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.where(
        torch.rand(samples, length, generator=generator) < 0.33,
        torch.randint(1, TOKENS - 1, (samples, length), generator=generator),
        1,
    )
    tokens = 1 + jumps.cumsum(1) % (TOKENS - 1)
    tokens[:, 0] = 0
    return Samples.of_tokens(tokens)
