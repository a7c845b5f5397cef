"""SinkLM: the decoder we train ourselves, an ordinary ``PreTrainedModel`` whose attention operation is a config field."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.operation import Operation
from sinklab.attention.seam import register_operation
from sinklab.errors import ConfigurationError

__all__ = ["SinkLM", "SinkLMConfig"]


class SinkLMConfig(PreTrainedConfig):
    """Shape of a :class:`SinkLM`: LLaMA style (rotary positions, pre-norm RMSNorm, SwiGLU, tied embeddings, no biases).

    Args:
        vocab_size, hidden_size, intermediate_size: widths.
        num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim: the attention layers; key-value heads must divide
            the heads, ``head_dim`` must be even.
        max_position_embeddings: context length of the training, in tokens.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square before the root.
        initializer_range: standard deviation of the normal initialisation; the two maps that write to the residual stream are
            divided by ``sqrt(2 * num_hidden_layers)``.
        operation: name and parameters of the attention operation, such as ``{"name": "sigmoid", "bias": -5.5}``. It is saved
            with the checkpoint, because transformers does not save the name of an attention implementation.

    Raises:
        ConfigurationError: fields that cannot go together.
    """

    model_type = "sinklm"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 2048,
        hidden_size: int = 128,
        intermediate_size: int = 352,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 2,
        num_key_value_heads: int | None = None,
        head_dim: int = 64,
        max_position_embeddings: int = 256,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        operation: dict[str, Any] | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.operation = {"name": "softmax"} if operation is None else dict(operation)
        if num_attention_heads % self.num_key_value_heads:
            raise ConfigurationError(
                f"num_key_value_heads {self.num_key_value_heads} must divide num_attention_heads {num_attention_heads}"
            )
        if head_dim % 2:
            raise ConfigurationError(f"head_dim {head_dim} must be even: rotary positions turn pairs of coordinates")
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight``, computed in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden_states.float(), (hidden_states.shape[-1],), self.weight.float(), self.eps).to(
            hidden_states.dtype
        )


def rotary_tables(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, ``(batch, 1, q_len, head_dim)``; angles in float32, both halves alike."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=position_ids.device).float() / head_dim)
    angles = position_ids[:, None, :, None].float() * torch.cat((frequencies, frequencies))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``(batch, heads, q_len, head_dim)`` (Su et al. 2021, LLaMA's half-split layout)."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Plain softmax attention with an additive mask; the default of ``attn_implementation="eager"``."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class SinkLMAttention(nn.Module):
    """Multi-head attention that hands queries, keys and values to the function named in the config."""

    is_causal = True

    def __init__(self, config: SinkLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.operation = Operation.from_dict(config.operation)
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention_mask: Tensor | None,
        past_key_values: DynamicCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        split = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = rotate(self.q_proj(hidden_states).view(split).transpose(1, 2), cos, sin)
        keys = rotate(self.k_proj(hidden_states).view(split).transpose(1, 2), cos, sin)
        values = self.v_proj(hidden_states).view(split).transpose(1, 2)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        outputs, weights = attend(self, queries, keys, values, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.o_proj(outputs.reshape(*hidden_states.shape[:-1], -1)), weights


class SinkLMMLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: SinkLMConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class SinkLMLayer(nn.Module):
    """Pre-norm block: attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: SinkLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SinkLMAttention(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SinkLMMLP(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        update, weights = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + update
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), weights


class SinkLM(PreTrainedModel, GenerationMixin):
    """Decoder with a language-model head; saves, loads and generates like any other transformers model.

    An operation other than softmax selects ``attn_implementation="sinklab_<operation>"`` by itself, so a checkpoint trained
    with sigmoid attention cannot come back as a softmax model.
    """

    config_class = SinkLMConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _no_split_modules = ["SinkLMLayer"]

    def __init__(self, config: SinkLMConfig) -> None:
        super().__init__(config)
        operation = Operation.from_dict(config.operation)
        if operation.name != "softmax":
            self.config._attn_implementation = register_operation(operation)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SinkLMLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Said here because transformers would guess it from the name of the class, fail, and warn at every start.
        self.loss_type = "ForCausalLM"
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, SinkLMLayer):
            # Children are initialised before their parent, so this is the last word on the two maps into the residual stream.
            deep = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            nn.init.normal_(module.self_attn.o_proj.weight, std=deep)
            nn.init.normal_(module.mlp.down_proj.weight, std=deep)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``(batch, seq_len, vocab_size)`` and, with ``labels``, the mean next-token loss in nats.

        Args:
            input_ids: ``(batch, seq_len)``; or ``inputs_embeds`` of ``(batch, seq_len, hidden_size)``.
            attention_mask: 1 for tokens, 0 for padding.
            position_ids: 0-based; by default they go on from the cache.
            labels: token ids, -100 where no loss is taken; shifted here.
            logits_to_keep: only the last so many positions get logits; 0 means all.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigurationError("give exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        cos, sin = rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta, hidden_states.dtype)
        all_hidden: list[Tensor] = [hidden_states]
        all_weights: list[Tensor | None] = []
        for layer in self.layers:
            hidden_states, weights = layer(
                hidden_states,
                cos=cos,
                sin=sin,
                attention_mask=mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                output_attentions=output_attentions,
                **kwargs,
            )
            all_hidden.append(hidden_states)
            all_weights.append(weights)
        hidden_states = self.norm(hidden_states)
        all_hidden[-1] = hidden_states
        logits = self.lm_head(hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(all_hidden) if output_hidden_states else None,
            attentions=tuple(all_weights) if output_attentions else None,  # type: ignore[arg-type]
        )


AutoConfig.register("sinklm", SinkLMConfig)
AutoModelForCausalLM.register(SinkLMConfig, SinkLM)
