"""SinkLM: the decoder we train ourselves, an ordinary ``PreTrainedModel`` with every axis of its architecture in the config."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from sinklab.attention.operation import HeadShape, Operation
from sinklab.attention.seam import implementation_name, register_operation
from sinklab.attention.state import OperationState, bind
from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.models.feed_forward import FeedForward
from sinklab.models.masking import Layout, fold_bias, lay_out, make_mask
from sinklab.models.norms import NORMS, Norm
from sinklab.positions._scheme import PositionScheme, Rotation
from sinklab.registry import positions

__all__ = ["SinkLM", "SinkLMConfig"]

FOREIGN_FIELDS = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig)) | {
    # What transformers takes besides its declared fields, or writes into config.json.
    *("model_type", "name_or_path", "attn_implementation", "experts_implementation", "output_attentions", "torch_dtype"),
    *("num_labels", "use_cache", "auto_map", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
}


class SinkLMConfig(PreTrainedConfig):
    """Config of a :class:`SinkLM`: the fields of :class:`~sinklab.models.architecture.Architecture`, flat.

    ``head_dim`` and ``num_key_value_heads`` are resolved. The operation and the position scheme are saved with the checkpoint,
    because transformers does not save the name of an attention implementation.

    Args:
        fields: those of the architecture, and those that every config of transformers takes.

    Raises:
        ConfigurationError: an unknown field (did you mean …?), a value that a field does not take, or fields that cannot go
            together.
        UnknownNameError: no operation or position scheme of that name.
    """

    model_type = "sinklm"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, **fields: Any) -> None:
        known = set(Architecture.model_fields)
        unknown = sorted(name for name in fields if name not in known | FOREIGN_FIELDS and not name.startswith("_"))
        if unknown:
            near = difflib.get_close_matches(unknown[0], known | FOREIGN_FIELDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"SinkLMConfig has no field {unknown[0]!r}.{hint} Fields of the architecture: "
                f"{', '.join(Architecture.model_fields)}"
            )
        architecture = Architecture(**{name: fields.pop(name) for name in known if name in fields})
        for name, value in architecture.model_dump().items():
            setattr(self, name, value)
        self.head_dim = architecture.head_size
        self.num_key_value_heads = architecture.kv_heads
        super().__init__(**fields)

    @classmethod
    def from_architecture(cls, architecture: Architecture, **fields: Any) -> Self:
        """The config of an architecture; ``fields`` are those of transformers, such as ``bos_token_id``."""
        return cls(**architecture.model_dump(), **fields)

    @property
    def architecture(self) -> Architecture:
        """The architecture, validated anew: attributes of a config can be set to anything."""
        return Architecture(**{name: getattr(self, name) for name in Architecture.model_fields})


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
    """Plain softmax attention with an additive or boolean mask; the default of ``attn_implementation="eager"``."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class SinkLMAttention(nn.Module):
    """Multi-head attention that hands queries, keys and values to the function named in the config.

    The outputs of the heads are concatenated before the output map, ``W_O [o_1 … o_H]``; or added, ``W_O Σ_h o_h`` with one map
    from ``head_dim`` to ``hidden_size`` for all heads. Gu et al. 2024 (arXiv 2410.10781) report an "addition" of heads without
    a formula and did not release it; this is the plainest reading.
    """

    is_causal = True

    def __init__(self, config: SinkLMConfig, layer_idx: int) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self.num_key_value_groups = num_heads // num_kv_heads
        self.scaling = head_dim**-0.5
        self.adds_heads = config.head_merge == "add"
        self.q_proj = nn.Linear(config.hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(head_dim if self.adds_heads else num_heads * head_dim, config.hidden_size, bias=False)
        operation = Operation.from_dict(config.operation)
        self.needs_layer_input = operation.needs_layer_input
        bind(self, operation, HeadShape(num_heads, num_kv_heads, head_dim, head_dim, config.hidden_size))

    def forward(
        self,
        hidden_states: Tensor,
        scheme: PositionScheme,
        rotation: Rotation | None,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        split = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = self.q_proj(hidden_states).view(split).transpose(1, 2)
        keys = self.k_proj(hidden_states).view(split).transpose(1, 2)
        values = self.v_proj(hidden_states).view(split).transpose(1, 2)
        if rotation is not None:
            queries, keys = scheme.rotate(queries, keys, rotation)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        if self.needs_layer_input:
            kwargs["layer_input"] = hidden_states
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        outputs, weights = attend(self, queries, keys, values, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        merged = outputs.sum(dim=2) if self.adds_heads else outputs.flatten(2)
        return self.o_proj(merged), weights


class SinkLMLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each added to the residual stream.

    ``pre``: ``x + f(norm(x))``; ``post``: ``norm(x + f(x))``; ``sandwich``: ``x + norm(f(norm(x)))``. The names of the norms
    are those of LLaMA (pre) and Gemma (sandwich), of which post has the two behind.
    """

    def __init__(self, config: SinkLMConfig, layer_idx: int) -> None:
        super().__init__()

        def norm() -> Norm:
            return NORMS[config.norm](config.hidden_size, config.norm_eps)

        self.placement = config.norm_placement
        self.self_attn = SinkLMAttention(config, layer_idx)
        self.mlp = FeedForward(config.feed_forward, config.hidden_size, config.intermediate_size)
        if self.placement != "post":
            self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        if self.placement == "sandwich":
            self.pre_feedforward_layernorm = norm()
        if self.placement != "pre":
            self.post_feedforward_layernorm = norm()

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.placement == "pre":
            update, weights = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + update
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), weights
        if self.placement == "post":
            update, weights = self.self_attn(hidden_states, **kwargs)
            hidden_states = self.post_attention_layernorm(hidden_states + update)
            return self.post_feedforward_layernorm(hidden_states + self.mlp(hidden_states)), weights
        update, weights = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.post_attention_layernorm(update)
        update = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(update), weights


class SinkLM(PreTrainedModel, GenerationMixin):
    """Decoder with a language-model head; saves, loads and generates like any other transformers model.

    The attention implementation is ``sinklab_<operation>``, so a checkpoint trained with sigmoid attention cannot come back as
    a softmax model. ``eager``, ``sdpa`` and ``flex_attention`` may be asked for where the operation is plain softmax.

    The model keeps a copy of the config.

    Raises:
        ConfigurationError: a config that does not validate, or an attention implementation that is not the operation's.
    """

    config_class = SinkLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _no_split_modules = ["SinkLMLayer"]
    _skip_keys_device_placement = ["past_key_values"]

    def __init__(self, config: SinkLMConfig) -> None:
        register_operation(Operation.from_dict(config.operation))
        # The name of the attention function is written into the config, which another model may be made of.
        super().__init__(copy.deepcopy(config))
        config, architecture = self.config, config.architecture
        settings = dict(architecture.position)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = positions[settings.pop("name", "rotary")](architecture, settings)
        self.layers = nn.ModuleList(SinkLMLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.Identity()
        if config.norm_placement != "post":
            self.norm = NORMS[config.norm](config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tokens_in_front = architecture.tokens_in_front
        if self.tokens_in_front:
            self.front_tokens = nn.Embedding(self.tokens_in_front, config.hidden_size)
        # Said here because transformers would guess it from the name of the class, fail, and warn at every start.
        self.loss_type = "ForCausalLM"
        # Trainer counts the targets of all micro-batches itself, and would count those of the prefix.
        self.accepts_loss_kwargs = not config.prefix
        self.gradient_checkpointing = False
        self.post_init()

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        operation = Operation.from_dict(self.config.operation).name
        own = implementation_name(operation)
        if attn_implementation in (None, own):
            return own
        if operation != "softmax" or attn_implementation.startswith(implementation_name("")):
            raise ConfigurationError(
                f"attention {attn_implementation!r} does not compute the operation of this SinkLM, {operation!r}; leave "
                "attn_implementation out, or change the operation in its config"
            )
        scheme = self.config.position.get("name", "rotary")
        if positions[scheme].biased and attn_implementation not in ("eager", "sdpa"):
            raise ConfigurationError(
                f"attention {attn_implementation!r} cannot add the bias of position scheme {scheme!r} to the scores; leave "
                "attn_implementation out"
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, though the class lives outside transformers: its initialisation leaves alone what was read from a checkpoint.

        Of custom code transformers does not expect that, and passes over modules without parameters of their own.
        """
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Inside transformers' initialisation nn.init leaves alone what was read from a checkpoint.
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.architecture.embedding_std)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self._std(module))
        elif isinstance(module, Norm | PositionScheme | OperationState):
            module.reset_parameters()
        elif isinstance(module, SinkLMLayer):
            # Children are initialised before their parent, so this is the last word on the two maps into the residual stream.
            for name, linear in (("attention", module.self_attn.o_proj), ("feed_forward", module.mlp.down_proj)):
                nn.init.normal_(linear.weight, std=self._std(linear, into_residual=name))
            # Again, now that the weights are drawn or read: what was taken from the former ones is taken from these.
            module.self_attn.operation.prepare(module.self_attn)

    def _std(self, linear: nn.Linear, into_residual: str | None = None) -> float:
        """Standard deviation of a map at the start; ``into_residual`` names the sublayer whose last map it is."""
        config, fan_in = self.config, linear.in_features
        if config.initialization == "depth_scaled":
            return config.initializer_range / ((2 * config.num_hidden_layers) ** 0.5 if into_residual else 1.0)
        # Gu et al. 2024 (arXiv 2410.10781), as released.
        if into_residual == "feed_forward":
            return fan_in**-0.5 / config.num_hidden_layers
        return (0.4 / fan_in) ** 0.5

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        # A static cache needs room for the tokens in front, which generate() does not count.
        length = max_cache_length + self.tokens_in_front
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, batch_size, length)

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The 2-D mask as it is: windows, prefixes and tokens in front are known only to :meth:`forward`."""
        return attention_mask

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``(batch, seq_len, vocab_size)`` and, with ``labels``, the mean next-token loss in nats.

        Learned tokens that the operation puts in front are neither in the arguments nor in the logits; hidden states,
        attentions and the cache have them first.

        Args:
            input_ids: ``(batch, seq_len)``; or ``inputs_embeds`` of ``(batch, seq_len, hidden_size)``.
            attention_mask: ``(batch, cached and given tokens)``, 1 for tokens, 0 for padding; or 4-D, boolean or additive,
                which then says all about visibility: window and prefix are left to it.
            position_ids: 0-based ``(batch or 1, seq_len)``; by default tokens are counted, cached ones too and padding not.
                Without attention mask and cache, a position that is not the next one begins a document, which sees only
                itself.
            labels: token ids, -100 where no loss is taken; shifted here. Tokens of the prefix are no targets.
            use_cache: make a cache if none is given; it is returned.
            logits_to_keep: only the last so many positions get logits, 0 means all; or their indices.
            kwargs: ``num_items_in_batch`` makes the loss the sum over targets divided by it; others go to the attention
                function.

        Raises:
            ConfigurationError: arguments that cannot go together, or weights asked for from an attention that keeps none.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigurationError("give exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        layout = lay_out(
            tokens=hidden_states.shape[1],
            front=self.tokens_in_front,
            seen=past_key_values.get_seq_length() if past_key_values is not None else 0,
            attention_mask=attention_mask,
            position_ids=position_ids,
            device=hidden_states.device,
        )
        added = layout.length - hidden_states.shape[1]
        if added:
            front = self.front_tokens.weight.to(hidden_states.dtype)
            hidden_states = torch.cat((front.expand(len(hidden_states), -1, -1), hidden_states), dim=1)
        mask, bias = self._visibility(hidden_states, layout, past_key_values)
        if bias is not None:
            kwargs["position_bias"] = bias
        hidden_states = self.position.embed(hidden_states, layout.position_ids)
        rotation = self.position.rotation(layout.position_ids, hidden_states.dtype)
        all_hidden: list[Tensor] = [hidden_states]
        all_weights: list[Tensor] = []
        for layer in self.layers:
            hidden_states, weights = layer(
                hidden_states,
                scheme=self.position,
                rotation=rotation,
                attention_mask=mask,
                past_key_values=past_key_values,
                position_ids=layout.position_ids,
                output_attentions=bool(output_attentions),
                **kwargs,
            )
            all_hidden.append(hidden_states)
            if output_attentions and weights is None:
                raise ConfigurationError(
                    f"attention {self.config._attn_implementation!r} keeps no weights to output; use "
                    'model.set_attn_implementation("eager")'
                )
            all_weights.append(weights)
        hidden_states = self.norm(hidden_states)
        all_hidden[-1] = hidden_states
        # -0 is 0: all of them.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, added:][:, kept])
        loss = None
        if labels is not None:
            if self.config.prefix:
                labels = labels.masked_fill(layout.inside_prefix(self.config.prefix), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=tuple(all_hidden) if output_hidden_states else None,
            attentions=tuple(all_weights) if output_attentions else None,
        )

    def _visibility(self, hidden_states: Tensor, layout: Layout, cache: Cache | None) -> tuple[Any, Tensor | None]:
        """The mask, and the bias of the scores where the attention function takes it beside the mask."""
        own = self.config._attn_implementation.startswith(implementation_name(""))
        mask = make_mask(
            self.config,
            hidden_states,
            layout,
            cache,
            window=self.config.window,
            prefix=self.config.prefix,
            explicit=self.position.biased and not own,
        )
        if not self.position.biased:
            return mask, None
        kv_len = layout.length if cache is None else cache.get_mask_sizes(layout.length, 0)[0]
        bias = self.position.score_bias(layout.position_ids, layout.key_positions(kv_len))
        return (mask, bias) if own else (fold_bias(mask, bias, hidden_states.dtype), None)


AutoConfig.register("sinklm", SinkLMConfig)
AutoModelForCausalLM.register(SinkLMConfig, SinkLM)
