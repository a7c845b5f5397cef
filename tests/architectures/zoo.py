"""The zoo: tiny models built from real transformers configs, one line of facts per family, and what the seam must do with each.

Every model is two to four layers of width 32, seeded, with weights large enough that attention is far from uniform and biases,
tables and sink logits far from zero: a term that a measurement forgot would show. docs/architectures.md
is made of it (page.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB = 40
LENGTH = 10
PADDING = 3
PAD_TOKEN = 0

Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One family of the zoo.

    Args:
        id: name of the family's folder in transformers.
        kind: ``decoder``, ``encoder``, ``encoder-decoder``, ``vision`` or ``audio``.
        model: class in transformers.
        config: fields of the tiny config.
        calls: attention calls of one forward; 0 for a model off the seam.
        inputs: what it is fed: ``tokens``, ``seq2seq``, ``pixels``, ``image_text``, ``video``, ``features`` or ``waveform``.
        backends: implementations in transformers' dispatch that the model supports.
        notes: the words in the table of docs/architectures.md that say what is special about it.
        refused: first module that computes attention in its own code, so that the model raises ``UnsupportedModelError``;
            ``None`` when it is measured.
        replaceable: whether an operation registered by name can take the place of its attention.
    """

    id: str
    kind: str
    model: str
    config: Mapping[str, Any]
    calls: int
    inputs: str = "tokens"
    backends: tuple[str, ...] = ("eager", "sdpa")
    notes: tuple[str, ...] = ()
    refused: str | None = None
    replaceable: bool = True

    @property
    def decodes(self) -> bool:
        """Whether it decodes token by token with a key-value cache."""
        return self.kind in ("decoder", "encoder-decoder")


def shape(**extra: Any) -> dict[str, Any]:
    """Fields that most configs share: two layers of width 32 with four heads."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": PAD_TOKEN,
        **extra,
    }


def grouped(**extra: Any) -> dict[str, Any]:
    """:func:`shape` with two key-value heads for four query heads."""
    return shape(num_key_value_heads=2, **extra)


def experts(**extra: Any) -> dict[str, Any]:
    """:func:`grouped` with a tiny mixture of experts."""
    return grouped(num_experts_per_tok=2, moe_intermediate_size=16, **extra)


def image(**extra: Any) -> dict[str, Any]:
    """Fields of a vision tower: 16 patches of an image of 16 × 16."""
    return {
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **extra,
    }


def sequence_to_sequence(**extra: Any) -> dict[str, Any]:
    """Fields of the BART family: two layers a side."""
    return {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        "pad_token_id": PAD_TOKEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
        **extra,
    }


T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "pad_token_id": PAD_TOKEN,
    "decoder_start_token_id": 0,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
SLIDING = ["sliding_attention", "full_attention"]


def has_interface(entry: Entry) -> bool:
    """Whether the installed transformers has the family on the attention interface."""
    return hasattr(inspect.getmodule(getattr(transformers, entry.model)), "ALL_ATTENTION_FUNCTIONS")


MOVED = tuple(
    Entry(
        id=family,
        kind="decoder",
        model=model,
        config={**GPT2, "rotary_dim": 4},
        calls=2,
        notes=("before transformers 5.24 of the second tier",),
    )
    for family, model in (("gptj", "GPTJForCausalLM"), ("codegen", "CodeGenForCausalLM"))
)
"""On the attention interface since transformers 5.24, before that in code of their own."""

DECODERS = (
    Entry(id="llama", kind="decoder", model="LlamaForCausalLM", config=grouped(), calls=2, notes=("grouped queries",)),
    Entry(
        id="llama4",
        kind="decoder",
        model="Llama4ForCausalLM",
        config=experts(
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=2,
            layer_types=["chunked_attention", "full_attention"],
            attention_chunk_size=4,
            no_rope_layers=[1, 0],
        ),
        calls=2,
        notes=("chunked window", "no positions in every other layer"),
    ),
    Entry(
        id="mistral",
        kind="decoder",
        model="MistralForCausalLM",
        config=grouped(sliding_window=4, head_dim=8),
        calls=2,
        notes=("sliding window",),
    ),
    Entry(
        id="mixtral",
        kind="decoder",
        model="MixtralForCausalLM",
        config=grouped(num_local_experts=4, num_experts_per_tok=2),
        calls=2,
        notes=("experts",),
    ),
    Entry(id="qwen2", kind="decoder", model="Qwen2ForCausalLM", config=grouped(), calls=2, notes=("query and key biases",)),
    Entry(id="qwen3", kind="decoder", model="Qwen3ForCausalLM", config=grouped(head_dim=8), calls=2, notes=("query-key norm",)),
    Entry(
        id="qwen3_moe",
        kind="decoder",
        model="Qwen3MoeForCausalLM",
        config=experts(head_dim=8, num_experts=4, decoder_sparse_step=1),
        calls=2,
        notes=("query-key norm", "experts"),
    ),
    Entry(
        id="qwen3_next",
        kind="decoder",
        model="Qwen3NextForCausalLM",
        config=experts(
            num_hidden_layers=4,
            head_dim=8,
            num_experts=4,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        calls=1,
        notes=("hybrid", "output gate"),
    ),
    Entry(id="gemma", kind="decoder", model="GemmaForCausalLM", config=grouped(head_dim=8), calls=2),
    Entry(
        id="gemma2",
        kind="decoder",
        model="Gemma2ForCausalLM",
        config=grouped(head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
        calls=2,
        backends=("eager",),
        notes=("soft cap", "sliding window"),
    ),
    Entry(
        id="gemma3",
        kind="decoder",
        model="Gemma3ForCausalLM",
        config=grouped(head_dim=8, sliding_window=4, query_pre_attn_scalar=8, layer_types=SLIDING),
        calls=2,
        notes=("sliding window", "query-key norm"),
    ),
    Entry(id="phi", kind="decoder", model="PhiForCausalLM", config=shape(), calls=2, notes=("parallel block",)),
    Entry(
        id="phi3", kind="decoder", model="Phi3ForCausalLM", config=grouped(sliding_window=4), calls=2, notes=("sliding window",)
    ),
    Entry(id="olmo2", kind="decoder", model="Olmo2ForCausalLM", config=grouped(), calls=2, notes=("query-key norm",)),
    Entry(
        id="olmo3",
        kind="decoder",
        model="Olmo3ForCausalLM",
        config=grouped(sliding_window=4, layer_types=SLIDING),
        calls=2,
        notes=("sliding window", "query-key norm"),
    ),
    Entry(id="gpt2", kind="decoder", model="GPT2LMHeadModel", config=GPT2, calls=2, notes=("learned positions",)),
    Entry(id="gpt_neox", kind="decoder", model="GPTNeoXForCausalLM", config=shape(), calls=2, notes=("partial rotary",)),
    Entry(
        id="opt",
        kind="decoder",
        model="OPTForCausalLM",
        config=shape(ffn_dim=48, word_embed_proj_dim=32),
        calls=2,
        notes=("queries scaled beforehand",),
    ),
    Entry(id="stablelm", kind="decoder", model="StableLmForCausalLM", config=grouped(), calls=2, notes=("partial rotary",)),
    Entry(id="cohere", kind="decoder", model="CohereForCausalLM", config=grouped(), calls=2, notes=("parallel block",)),
    Entry(
        id="cohere2",
        kind="decoder",
        model="Cohere2ForCausalLM",
        config=grouped(sliding_window=4, layer_types=SLIDING),
        calls=2,
        notes=("sliding window",),
    ),
    Entry(
        id="granite",
        kind="decoder",
        model="GraniteForCausalLM",
        config=grouped(attention_multiplier=0.5),
        calls=2,
        notes=("scale from the config",),
    ),
    Entry(id="nemotron", kind="decoder", model="NemotronForCausalLM", config=grouped(), calls=2),
    Entry(
        id="starcoder2",
        kind="decoder",
        model="Starcoder2ForCausalLM",
        config=grouped(sliding_window=4),
        calls=2,
        notes=("sliding window",),
    ),
    Entry(
        id="smollm3",
        kind="decoder",
        model="SmolLM3ForCausalLM",
        config=grouped(no_rope_layers=[1, 0]),
        calls=2,
        notes=("no positions in every other layer",),
    ),
    Entry(id="gpt_bigcode", kind="decoder", model="GPTBigCodeForCausalLM", config=GPT2, calls=2, notes=("one key-value head",)),
    Entry(id="biogpt", kind="decoder", model="BioGptForCausalLM", config=shape(), calls=2, notes=("learned positions",)),
    Entry(
        id="deepseek_v2",
        kind="decoder",
        model="DeepseekV2ForCausalLM",
        config=shape(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            first_k_dense_replace=2,
            n_routed_experts=4,
        ),
        calls=2,
        notes=("latent attention: value width differs from key width",),
    ),
    Entry(
        id="deepseek_v3",
        kind="decoder",
        model="DeepseekV3ForCausalLM",
        config=shape(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            first_k_dense_replace=2,
        ),
        calls=2,
        notes=("latent attention: value width differs from key width",),
    ),
    Entry(
        id="deepseek_v32",
        kind="decoder",
        model="DeepseekV32ForCausalLM",
        config=shape(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            first_k_dense_replace=2,
            index_topk=3,
            index_head_dim=8,
            index_n_heads=2,
        ),
        calls=2,
        replaceable=False,
        notes=("sparse: an indexer chooses the keys",),
    ),
    Entry(
        id="gpt_oss",
        kind="decoder",
        model="GptOssForCausalLM",
        config=grouped(head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2, layer_types=SLIDING),
        calls=2,
        backends=("eager",),
        replaceable=False,
        notes=("learned sink logit", "sliding window", "experts"),
    ),
    Entry(
        id="granite_swa",
        kind="decoder",
        model="GraniteSWAForCausalLM",
        config=grouped(sliding_window=4, layer_types=SLIDING),
        calls=2,
        backends=("eager",),
        replaceable=False,
        notes=("learned sink logit as a gain on the output", "sliding window"),
    ),
    Entry(
        id="mimo_v2_flash",
        kind="decoder",
        model="MiMoV2FlashForCausalLM",
        config=experts(head_dim=8, v_head_dim=6, sliding_window=4, layer_types=SLIDING, n_routed_experts=4),
        calls=2,
        backends=("eager",),
        replaceable=False,
        notes=("learned sink logit in sliding layers", "sliding window"),
    ),
    Entry(
        id="bamba",
        kind="decoder",
        model="BambaForCausalLM",
        config=grouped(
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=8,
        ),
        calls=1,
        notes=("hybrid",),
    ),
    *filter(has_interface, MOVED),
)

ENCODERS = (
    Entry(id="bert", kind="encoder", model="BertModel", config=shape(), calls=2),
    Entry(id="roberta", kind="encoder", model="RobertaModel", config=shape(), calls=2),
    Entry(id="electra", kind="encoder", model="ElectraModel", config=shape(embedding_size=32), calls=2),
    Entry(
        id="albert",
        kind="encoder",
        model="AlbertModel",
        config=shape(num_hidden_layers=4, embedding_size=16),
        calls=4,
        notes=("one module called four times",),
    ),
    Entry(
        id="distilbert",
        kind="encoder",
        model="DistilBertModel",
        config={"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        calls=2,
    ),
    Entry(
        id="modernbert",
        kind="encoder",
        model="ModernBertModel",
        config=shape(local_attention=4, layer_types=SLIDING),
        calls=2,
        notes=("two-sided window",),
    ),
    Entry(id="esm", kind="encoder", model="EsmModel", config=shape(mask_token_id=3, position_embedding_type="rotary"), calls=2),
)

ENCODER_DECODERS = (
    Entry(
        id="t5",
        kind="encoder-decoder",
        model="T5ForConditionalGeneration",
        config=T5,
        calls=6,
        inputs="seq2seq",
        notes=("position bias", "cross-attention"),
    ),
    Entry(
        id="umt5",
        kind="encoder-decoder",
        model="UMT5ForConditionalGeneration",
        config=T5,
        calls=6,
        inputs="seq2seq",
        notes=("position bias in every layer", "cross-attention"),
    ),
    Entry(
        id="bart",
        kind="encoder-decoder",
        model="BartForConditionalGeneration",
        config=sequence_to_sequence(),
        calls=6,
        inputs="seq2seq",
        notes=("cross-attention",),
    ),
    Entry(
        id="mbart",
        kind="encoder-decoder",
        model="MBartForConditionalGeneration",
        config=sequence_to_sequence(),
        calls=6,
        inputs="seq2seq",
        notes=("cross-attention",),
    ),
    Entry(
        id="marian",
        kind="encoder-decoder",
        model="MarianMTModel",
        config=sequence_to_sequence(decoder_vocab_size=VOCAB),
        calls=6,
        inputs="seq2seq",
        notes=("cross-attention",),
    ),
    Entry(
        id="pegasus",
        kind="encoder-decoder",
        model="PegasusForConditionalGeneration",
        config=sequence_to_sequence(),
        calls=6,
        inputs="seq2seq",
        notes=("cross-attention",),
    ),
    Entry(
        id="whisper",
        kind="encoder-decoder",
        model="WhisperForConditionalGeneration",
        config=sequence_to_sequence(num_mel_bins=8, max_source_positions=8, max_target_positions=32, eos_token_id=2),
        calls=6,
        inputs="features",
        notes=("cross-attention",),
    ),
)

VISION_AND_AUDIO = (
    Entry(id="vit", kind="vision", model="ViTModel", config=image(), calls=2, inputs="pixels"),
    Entry(id="deit", kind="vision", model="DeiTModel", config=image(), calls=2, inputs="pixels"),
    Entry(
        id="beit",
        kind="vision",
        model="BeitModel",
        config=image(use_relative_position_bias=True),
        calls=2,
        inputs="pixels",
        notes=("position bias folded into the mask",),
    ),
    Entry(id="dinov2", kind="vision", model="Dinov2Model", config=image(), calls=2, inputs="pixels"),
    Entry(
        id="dinov2_with_registers",
        kind="vision",
        model="Dinov2WithRegistersModel",
        config=image(num_register_tokens=2),
        calls=2,
        inputs="pixels",
        notes=("register tokens",),
    ),
    Entry(
        id="dinov3_vit",
        kind="vision",
        model="DINOv3ViTModel",
        config=image(num_register_tokens=2),
        calls=2,
        inputs="pixels",
        notes=("register tokens", "rotary"),
    ),
    Entry(
        id="swin",
        kind="vision",
        model="SwinModel",
        config={
            "image_size": 16,
            "patch_size": 2,
            "num_channels": 3,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 2,
        },
        calls=4,
        inputs="pixels",
        notes=("windows in the batch axis", "position bias and shift (-100, which hides) folded into the mask"),
    ),
    Entry(
        id="clip",
        kind="vision",
        model="CLIPModel",
        config={"text_config": shape(bos_token_id=1, eos_token_id=2), "vision_config": image(), "projection_dim": 16},
        calls=4,
        inputs="image_text",
        notes=("two towers, one causal",),
    ),
    Entry(
        id="siglip",
        kind="vision",
        model="SiglipModel",
        config={"text_config": shape(bos_token_id=1, eos_token_id=2, projection_size=32), "vision_config": image()},
        calls=4,
        inputs="image_text",
        notes=("two towers", "pooling head off the interface"),
    ),
    Entry(
        id="videomae",
        kind="vision",
        model="VideoMAEModel",
        config=image(num_frames=4, tubelet_size=2),
        calls=2,
        inputs="video",
    ),
    Entry(
        id="wav2vec2",
        kind="audio",
        model="Wav2Vec2Model",
        config=shape(
            conv_dim=[16, 16],
            conv_kernel=[8, 4],
            conv_stride=[8, 4],
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
        ),
        calls=2,
        inputs="waveform",
    ),
    Entry(
        id="hubert",
        kind="audio",
        model="HubertModel",
        config=shape(
            conv_dim=[16, 16],
            conv_kernel=[8, 4],
            conv_stride=[8, 4],
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
        ),
        calls=2,
        inputs="waveform",
    ),
)

MEASURED = (*DECODERS, *ENCODERS, *ENCODER_DECODERS, *VISION_AND_AUDIO)

OFF_SEAM = (
    Entry(
        id="bloom",
        kind="decoder",
        model="BloomForCausalLM",
        config=shape(n_layer=2, n_head=4),
        calls=0,
        backends=("eager",),
        refused="transformer.h.0.self_attention",
    ),
    Entry(
        id="falcon",
        kind="decoder",
        model="FalconForCausalLM",
        config=shape(),
        calls=0,
        notes=("not causal on sdpa once attentions are requested, so `eager` is used",),
        refused="transformer.h.0.self_attention",
    ),
    Entry(
        id="mpt",
        kind="decoder",
        model="MptForCausalLM",
        config={"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        calls=0,
        backends=("eager",),
        refused="transformer.blocks.0.attn",
    ),
    Entry(
        id="gpt_neo",
        kind="decoder",
        model="GPTNeoForCausalLM",
        config=shape(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
        calls=0,
        backends=("eager",),
        notes=("sliding window in every other layer",),
        refused="transformer.h.0.attn.attention",
    ),
    *(
        dataclasses.replace(entry, calls=0, backends=("eager",), notes=(), refused="transformer.h.0.attn")
        for entry in MOVED
        if not has_interface(entry)
    ),
    Entry(
        id="xglm",
        kind="decoder",
        model="XGLMForCausalLM",
        config=shape(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48),
        calls=0,
        backends=("eager",),
        refused="model.layers.0.self_attn",
    ),
    Entry(
        id="deberta_v2",
        kind="encoder",
        model="DebertaV2Model",
        config=shape(relative_attention=True, pos_att_type=["p2c", "c2p"]),
        calls=0,
        backends=("eager",),
        refused="encoder.layer.0.attention.self",
    ),
    Entry(
        id="mpnet",
        kind="encoder",
        model="MPNetModel",
        config=shape(),
        calls=0,
        backends=("eager",),
        refused="encoder.layer.0.attention.attn",
    ),
    Entry(
        id="longformer",
        kind="encoder",
        model="LongformerModel",
        config=shape(attention_window=4),
        calls=0,
        backends=("eager",),
        notes=("weights of windows, not of queries and keys",),
        refused="encoder.layer.0.attention.self",
    ),
)

SECOND_TIER = tuple(entry for entry in OFF_SEAM if entry.id != "longformer")
"""Measured from the weights that they return."""


ZOO: dict[str, Entry] = {entry.id: entry for entry in (*MEASURED, *OFF_SEAM)}


def build(entry: Entry, backend: str = "eager", **changes: Any) -> PreTrainedModel:
    """A fresh, seeded model of the family in evaluation mode; ``changes`` replace fields of the config."""
    model_class = getattr(transformers, entry.model)
    config = model_class.config_class(**{**entry.config, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for vectors that start out random; everything else is set below
        model = model_class._from_config(config, attn_implementation=backend).float().eval()
    enliven(model, seed=zlib.crc32(entry.id.encode()))
    return model


def enliven(model: torch.nn.Module, seed: int) -> None:
    """Random values for every parameter, sized so that scores have a standard deviation near one.

    Fresh models have weights of 0.02 and zero biases: their attention is uniform, and most mistakes in a score would not show.
    """
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 1.5 * (parameter.numel() // parameter.shape[0]) ** -0.5)
            else:
                parameter.add_(noise, alpha=0.3)


@functools.cache
def model_of(family: str, backend: str = "eager") -> PreTrainedModel:
    """The model of a family, built once per process; tests must leave it as they found it."""
    return build(ZOO[family], backend)


def batch_of(entry: Entry, padded: bool = False) -> Batch:
    """A deterministic batch of two; padded on the left for decoders, on the right for the others."""
    random = torch.Generator().manual_seed(1)

    def tokens(length: int = LENGTH) -> Tensor:
        return torch.randint(4, VOCAB, (2, length), generator=random)

    def mask(length: int, left: bool) -> Tensor:
        valid = torch.ones(2, length, dtype=torch.long)
        if padded:
            valid[1, :PADDING] = 0 if left else 1
            valid[1, length - PADDING :] = 1 if left else 0
        return valid

    if entry.inputs == "tokens":
        batch = {"input_ids": tokens(), "attention_mask": mask(LENGTH, left=entry.kind == "decoder")}
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, PAD_TOKEN)
        return batch
    if entry.inputs == "seq2seq":
        return {"input_ids": tokens(), "attention_mask": mask(LENGTH, left=False), "decoder_input_ids": tokens(6)}
    if entry.inputs == "pixels":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=random)}
    if entry.inputs == "video":
        return {"pixel_values": torch.randn(2, 4, 3, 16, 16, generator=random)}
    if entry.inputs == "image_text":
        return {
            "input_ids": tokens(),
            "attention_mask": mask(LENGTH, left=False),
            "pixel_values": torch.randn(2, 3, 16, 16, generator=random),
        }
    if entry.inputs == "features":
        return {"input_features": torch.randn(2, 8, 16, generator=random), "decoder_input_ids": tokens(6)}
    if entry.inputs == "waveform":
        valid = torch.ones(2, 320, dtype=torch.long)
        if padded:
            valid[1, 224:] = 0
        return {"input_values": torch.randn(2, 320, generator=random), "attention_mask": valid}
    raise ValueError(f"{entry.id}: no batch for inputs {entry.inputs!r}")
