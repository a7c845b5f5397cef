"""The zoo: tiny models built from real transformers configs, one line of facts per family, and what the seam must do with each.

Every model is two to four layers of width 32, seeded, with weights large enough that attention is far from uniform and biases,
tables and sink logits far from zero: a term that a measurement forgot would show. docs/architectures.md
lists them (test_page.py).
"""

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

EAGER = ("eager",)

Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
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
        refused: first module that computes attention in its own code, so that the model raises ``UnsupportedModelError``;
            ``None`` when it is measured.
        replaceable: whether an operation registered by name can take the place of its attention.
    """

    id: str
    kind: str
    model: str
    config: Mapping[str, Any]
    calls: int = 2
    inputs: str = "tokens"
    backends: tuple[str, ...] = ("eager", "sdpa")
    refused: str | None = None
    replaceable: bool = True

    @property
    def decodes(self) -> bool:
        """Whether it decodes token by token with a key-value cache."""
        return self.kind in ("decoder", "encoder-decoder")


def shape(**extra: Any) -> dict[str, Any]:
    """Fields that most configs share: two layers of width 32 with four heads."""
    return {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": PAD_TOKEN, **extra,
    }  # fmt: skip


def grouped(**extra: Any) -> dict[str, Any]:
    """:func:`shape` with two key-value heads for four query heads."""
    return shape(num_key_value_heads=2, **extra)


def experts(**extra: Any) -> dict[str, Any]:
    """:func:`grouped` with a tiny mixture of experts."""
    return grouped(num_experts_per_tok=2, moe_intermediate_size=16, **extra)


def latent(**extra: Any) -> dict[str, Any]:
    """:func:`shape` with latent attention, whose values are narrower than its keys."""
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    return shape(num_key_value_heads=4, first_k_dense_replace=2, **ranks, **extra)


def image(**extra: Any) -> dict[str, Any]:
    """Fields of a vision tower: 16 patches of an image of 16 × 16."""
    return {
        "image_size": 16, "patch_size": 4, "num_channels": 3, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, **extra,
    }  # fmt: skip


def sequence_to_sequence(**extra: Any) -> dict[str, Any]:
    """Fields of the BART family: two layers a side."""
    return {
        "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
        "pad_token_id": PAD_TOKEN, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        "forced_eos_token_id": None, **extra,
    }  # fmt: skip


T5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "pad_token_id": PAD_TOKEN,
    "decoder_start_token_id": 0,
}  # fmt: skip
WAVES = {
    "conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [8, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer",
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
SINK_LOGITS: Any = {"backends": EAGER, "replaceable": False}
SLIDING = ["sliding_attention", "full_attention"]


def has_interface(entry: Entry) -> bool:
    """Whether the installed transformers has the family on the attention interface."""
    return hasattr(inspect.getmodule(getattr(transformers, entry.model)), "ALL_ATTENTION_FUNCTIONS")


MOVED = tuple(
    Entry(family, "decoder", model, {**GPT2, "rotary_dim": 4})
    for family, model in (("gptj", "GPTJForCausalLM"), ("codegen", "CodeGenForCausalLM"))
)
"""On the attention interface since transformers 5.24, before that in code of their own."""

LLAMA4 = experts(
    head_dim=8, intermediate_size_mlp=48, num_local_experts=2, layer_types=["chunked_attention", "full_attention"],
    attention_chunk_size=4, no_rope_layers=[1, 0],
)  # fmt: skip
QWEN3_NEXT = experts(
    num_hidden_layers=4, head_dim=8, num_experts=4, shared_expert_intermediate_size=16, linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
BAMBA = grouped(
    attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=4,
    mamba_expand=2, mamba_chunk_size=8,
)  # fmt: skip

DECODERS = (
    Entry("llama", "decoder", "LlamaForCausalLM", grouped()),
    Entry("llama4", "decoder", "Llama4ForCausalLM", LLAMA4),
    Entry("mistral", "decoder", "MistralForCausalLM", grouped(sliding_window=4, head_dim=8)),
    Entry("mixtral", "decoder", "MixtralForCausalLM", grouped(num_local_experts=4, num_experts_per_tok=2)),
    Entry("qwen2", "decoder", "Qwen2ForCausalLM", grouped()),
    Entry("qwen3", "decoder", "Qwen3ForCausalLM", grouped(head_dim=8)),
    Entry("qwen3_moe", "decoder", "Qwen3MoeForCausalLM", experts(head_dim=8, num_experts=4, decoder_sparse_step=1)),
    Entry("qwen3_next", "decoder", "Qwen3NextForCausalLM", QWEN3_NEXT, 1),
    Entry("gemma", "decoder", "GemmaForCausalLM", grouped(head_dim=8)),
    Entry(
        "gemma2",
        "decoder",
        "Gemma2ForCausalLM",
        grouped(head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
        backends=EAGER,
    ),
    Entry(
        "gemma3",
        "decoder",
        "Gemma3ForCausalLM",
        grouped(head_dim=8, sliding_window=4, query_pre_attn_scalar=8, layer_types=SLIDING),
    ),
    Entry("phi", "decoder", "PhiForCausalLM", shape()),
    Entry("phi3", "decoder", "Phi3ForCausalLM", grouped(sliding_window=4)),
    Entry("olmo2", "decoder", "Olmo2ForCausalLM", grouped()),
    Entry("olmo3", "decoder", "Olmo3ForCausalLM", grouped(sliding_window=4, layer_types=SLIDING)),
    Entry("gpt2", "decoder", "GPT2LMHeadModel", GPT2),
    Entry("gpt_neox", "decoder", "GPTNeoXForCausalLM", shape()),
    Entry("opt", "decoder", "OPTForCausalLM", shape(ffn_dim=48, word_embed_proj_dim=32)),
    Entry("stablelm", "decoder", "StableLmForCausalLM", grouped()),
    Entry("cohere", "decoder", "CohereForCausalLM", grouped()),
    Entry("nanochat", "decoder", "NanoChatForCausalLM", grouped()),
    Entry("cohere2", "decoder", "Cohere2ForCausalLM", grouped(sliding_window=4, layer_types=SLIDING)),
    Entry("granite", "decoder", "GraniteForCausalLM", grouped(attention_multiplier=0.5)),
    Entry("nemotron", "decoder", "NemotronForCausalLM", grouped()),
    Entry("starcoder2", "decoder", "Starcoder2ForCausalLM", grouped(sliding_window=4)),
    Entry("smollm3", "decoder", "SmolLM3ForCausalLM", grouped(no_rope_layers=[1, 0])),
    Entry("gpt_bigcode", "decoder", "GPTBigCodeForCausalLM", GPT2),
    Entry("biogpt", "decoder", "BioGptForCausalLM", shape()),
    Entry("deepseek_v2", "decoder", "DeepseekV2ForCausalLM", latent(n_routed_experts=4)),
    Entry("deepseek_v3", "decoder", "DeepseekV3ForCausalLM", latent()),
    Entry(
        "deepseek_v32",
        "decoder",
        "DeepseekV32ForCausalLM",
        latent(index_topk=3, index_head_dim=8, index_n_heads=2),
        replaceable=False,
    ),
    Entry(
        "gpt_oss",
        "decoder",
        "GptOssForCausalLM",
        grouped(head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2, layer_types=SLIDING),
        **SINK_LOGITS,
    ),
    Entry("granite_swa", "decoder", "GraniteSWAForCausalLM", grouped(sliding_window=4, layer_types=SLIDING), **SINK_LOGITS),
    Entry(
        "mimo_v2_flash",
        "decoder",
        "MiMoV2FlashForCausalLM",
        experts(head_dim=8, v_head_dim=6, sliding_window=4, layer_types=SLIDING, n_routed_experts=4),
        **SINK_LOGITS,
    ),
    Entry("bamba", "decoder", "BambaForCausalLM", BAMBA, 1),
    *filter(has_interface, MOVED),
)

ENCODERS = (
    Entry("bert", "encoder", "BertModel", shape()),
    Entry("roberta", "encoder", "RobertaModel", shape()),
    Entry("electra", "encoder", "ElectraModel", shape(embedding_size=32)),
    Entry("albert", "encoder", "AlbertModel", shape(num_hidden_layers=4, embedding_size=16), 4),
    Entry(
        "distilbert",
        "encoder",
        "DistilBertModel",
        {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    ),
    Entry("modernbert", "encoder", "ModernBertModel", shape(local_attention=4, layer_types=SLIDING)),
    Entry("esm", "encoder", "EsmModel", shape(mask_token_id=3, position_embedding_type="rotary")),
)


def pair(family: str, model: str, config: Mapping[str, Any], inputs: str = "seq2seq") -> Entry:
    """An encoder–decoder of two layers a side."""
    return Entry(family, "encoder-decoder", model, config, 6, inputs=inputs)


ENCODER_DECODERS = (
    pair("t5", "T5ForConditionalGeneration", T5),
    pair("umt5", "UMT5ForConditionalGeneration", T5),
    pair("bart", "BartForConditionalGeneration", sequence_to_sequence()),
    pair("mbart", "MBartForConditionalGeneration", sequence_to_sequence()),
    pair("marian", "MarianMTModel", sequence_to_sequence(decoder_vocab_size=VOCAB)),
    pair("pegasus", "PegasusForConditionalGeneration", sequence_to_sequence()),
    Entry(
        "whisper",
        "encoder-decoder",
        "WhisperForConditionalGeneration",
        sequence_to_sequence(num_mel_bins=8, max_source_positions=8, max_target_positions=32, eos_token_id=2),
        6,
        inputs="features",
    ),
)

VISION_AND_AUDIO = (
    Entry("vit", "vision", "ViTModel", image(), inputs="pixels"),
    Entry("deit", "vision", "DeiTModel", image(), inputs="pixels"),
    Entry("beit", "vision", "BeitModel", image(use_relative_position_bias=True), inputs="pixels"),
    Entry("dinov2", "vision", "Dinov2Model", image(), inputs="pixels"),
    Entry("dinov2_with_registers", "vision", "Dinov2WithRegistersModel", image(num_register_tokens=2), inputs="pixels"),
    Entry("dinov3_vit", "vision", "DINOv3ViTModel", image(num_register_tokens=2), inputs="pixels"),
    Entry(
        "swin",
        "vision",
        "SwinModel",
        {"image_size": 16, "patch_size": 2, "num_channels": 3, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
        | {"window_size": 2},
        4,
        inputs="pixels",
    ),
    Entry(
        "clip",
        "vision",
        "CLIPModel",
        {"text_config": shape(bos_token_id=1, eos_token_id=2), "vision_config": image(), "projection_dim": 16},
        4,
        inputs="image_text",
    ),
    Entry(
        "siglip",
        "vision",
        "SiglipModel",
        {"text_config": shape(bos_token_id=1, eos_token_id=2, projection_size=32), "vision_config": image()},
        4,
        inputs="image_text",
    ),
    Entry("videomae", "vision", "VideoMAEModel", image(num_frames=4, tubelet_size=2), inputs="video"),
    Entry("wav2vec2", "audio", "Wav2Vec2Model", shape(**WAVES), inputs="waveform"),
    Entry("hubert", "audio", "HubertModel", shape(**WAVES), inputs="waveform"),
)

MEASURED = (*DECODERS, *ENCODERS, *ENCODER_DECODERS, *VISION_AND_AUDIO)


def own(
    family: str, kind: str, model: str, config: Mapping[str, Any], refused: str, backends: tuple[str, ...] = EAGER
) -> Entry:
    """A family that computes attention in its own code."""
    return Entry(family, kind, model, config, 0, backends=backends, refused=refused)


OFF_SEAM = (
    own("bloom", "decoder", "BloomForCausalLM", shape(n_layer=2, n_head=4), "transformer.h.0.self_attention"),
    Entry("falcon", "decoder", "FalconForCausalLM", shape(), 0, refused="transformer.h.0.self_attention"),
    own(
        "mpt",
        "decoder",
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "transformer.blocks.0.attn",
    ),
    own(
        "gpt_neo",
        "decoder",
        "GPTNeoForCausalLM",
        shape(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
        "transformer.h.0.attn.attention",
    ),
    *(
        dataclasses.replace(entry, calls=0, backends=EAGER, refused="transformer.h.0.attn")
        for entry in MOVED
        if not has_interface(entry)
    ),
    own(
        "xglm",
        "decoder",
        "XGLMForCausalLM",
        shape(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48),
        "model.layers.0.self_attn",
    ),
    own(
        "deberta_v2",
        "encoder",
        "DebertaV2Model",
        shape(relative_attention=True, pos_att_type=["p2c", "c2p"]),
        "encoder.layer.0.attention.self",
    ),
    Entry("mpnet", "encoder", "MPNetModel", shape(), 0, backends=EAGER, refused="encoder.layer.0.attention.attn"),
    own("longformer", "encoder", "LongformerModel", shape(attention_window=4), "encoder.layer.0.attention.self"),
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
