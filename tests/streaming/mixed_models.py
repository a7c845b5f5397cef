"""Decoders of the streaming tests whose layers differ: of linear attention beside full attention, in one layer or in turns, and
layers that share the keys of others."""

from __future__ import annotations

import functools

import torch
import transformers
from tests.architectures.zoo import VOCAB
from transformers import PreTrainedModel

__all__ = ["MAMBA", "RECURRENT", "SHAPE", "SHARED", "built"]

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")} | {
    f"linear_{kind}_head_dim": 8 for kind in ("key", "value")
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
EXPERTS = {"num_experts_per_tok": 1}
TURNS = ["linear_attention", "full_attention"] * 2

RECURRENT = {
    "Qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "head_dim": 8}),
    "OlmoHybrid": ("OlmoHybridConfig", {**DELTA, "layer_types": TURNS}),
    "Lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "shared_intermediate_size": 32},
    ),
    "Jamba": (
        "JambaConfig",
        {**EXPERTS, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
}
HYBRID = {
    "FalconH1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 64}),
    "Zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "mamba_headdim": 16,
            "mamba_d_state": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "use_mem_rope": True,
            "time_step_min": 1e-9,  # by which prompts clamp and single tokens do not
            "num_key_value_heads": 4,
        },
    ),
}
RECURRENT |= HYBRID
SHARED = {
    "Gemma3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["full_attention"] * 4,
            "laurel_rank": 4,
        },
    )
}


@functools.cache
def built(family: str) -> PreTrainedModel:
    """With weights large enough that attention is far from uniform."""
    config, changes = (RECURRENT | SHARED)[family]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model
