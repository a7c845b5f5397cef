"""SinkLM: the decoder we train ourselves, an ordinary ``PreTrainedModel`` with every axis of its architecture in the config."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from sinklab.attention.host_arguments import CACHE
from sinklab.attention.operation import OperationState
from sinklab.attention.seam import implementation_name, register_operation
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.block import NORMS, Norm, SinkLMConfig, SinkLMLayer
from sinklab.models.masking import Layout, fold_bias, lay_out, make_mask
from sinklab.positions.base import PositionScheme
from sinklab.registry import operations, positions

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["SinkLM", "SinkLMConfig"]


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
    _skip_keys_device_placement = [CACHE]

    def __init__(self, config: SinkLMConfig) -> None:
        register_operation(operations.make(config.operation))
        # The name of the attention function is written into the config, which another model may be made of.
        super().__init__(copy.deepcopy(config))
        config, architecture = self.config, config.architecture
        settings = dict(architecture.position)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = positions[settings.pop("name", "rotary")](architecture, settings)
        self.layers = nn.ModuleList(SinkLMLayer(config, index) for index in range(config.num_hidden_layers))
        norm = nn.Identity() if config.norm_placement == "post" else NORMS[config.norm](config.hidden_size, config.norm_eps)
        self.norm: nn.Module = norm
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tokens_in_front = architecture.tokens_in_front
        if self.tokens_in_front:
            self.front_tokens = nn.Embedding(self.tokens_in_front, config.hidden_size)
        # Said here because transformers would guess it from the name of the class, fail, and warn at every start.
        self.loss_type = "ForCausalLM"
        # Trainer counts the targets of all micro-batches itself, and would count those of the prefix.
        self.accepts_loss_kwargs = not config.prefix_length
        self.gradient_checkpointing = False
        self.post_init()

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: object, **kwargs: object) -> str:
        operation = operations.make(self.config.operation).name
        own = implementation_name(operation)
        if attn_implementation in (None, own):
            return own
        if operation != "softmax" or attn_implementation.startswith(implementation_name("")):
            raise ConfigurationError(
                f"attention {attn_implementation!r} does not compute the operation of this SinkLM, {operation!r}; leave it out"
            )
        scheme = self.config.position.get("name", "rotary")
        if positions[scheme].biased and attn_implementation not in ("eager", "sdpa"):
            raise ConfigurationError(
                f"attention {attn_implementation!r} cannot add the bias of position scheme {scheme!r}; leave it out"
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
        if config.initialization != "released":
            shrunk = into_residual is not None and config.initialization == "depth_scaled"
            return config.initializer_range / ((2 * config.num_hidden_layers) ** 0.5 if shrunk else 1.0)
        # Gu et al. 2024 (arXiv 2410.10781), as released.
        if into_residual == "feed_forward":
            return fan_in**-0.5 / config.num_hidden_layers
        return (0.4 / fan_in) ** 0.5

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def _prepare_cache_for_generation(
        self, generation_config: object, model_kwargs: object, generation_mode: object, batch_size: int, max_cache_length: int
    ) -> None:
        # A static cache needs room for the tokens in front, which generate() does not count.
        length = max_cache_length + self.tokens_in_front
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, batch_size, length)

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **_: object) -> Tensor | None:
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
        cache: Cache | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        """Logits ``(batch, seq_len, vocab_size)`` and, with ``labels``, the mean next-token loss in nats.

        Learned tokens that the operation puts in front are neither in the arguments nor in the logits; hidden states,
        attentions, the cache and masks of four dimensions have them first.

        Args:
            input_ids: ``(batch, seq_len)``; or ``inputs_embeds`` of ``(batch, seq_len, hidden_size)``.
            attention_mask: ``(batch, cached and given tokens)``, 1 for tokens, 0 for padding; or 4-D, boolean or additive,
                which then says all about visibility: window and prefix are left to it.
            position_ids: 0-based ``(batch or 1, seq_len)``; by default tokens are counted, cached ones too and padding not.
            labels: token ids, -100 where no loss is taken; shifted here. Tokens of the prefix are no targets.
            past_key_values, cache: the same under the names of older and newer releases of transformers.
            use_cache: make a cache if none is given; it is returned.
            logits_to_keep: only the last so many positions get logits, 0 means all; or their indices.
            kwargs: ``num_items_in_batch`` makes the loss the sum over targets divided by it; others go to the attention
                function.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigurationError("give exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if not hidden_states.numel():
            raise InputError(f"an input of shape {tuple(hidden_states.shape[:2])} holds no token; give at least one")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if cache is None:
            cache = past_key_values
        elif past_key_values is not None:
            raise ConfigurationError("give one cache, as cache or as past_key_values")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        layout = lay_out(
            tokens=hidden_states.shape[1], front=self.tokens_in_front, cache=cache, attention_mask=attention_mask,
            position_ids=position_ids, device=hidden_states.device,
        )  # fmt: skip
        added = layout.length - hidden_states.shape[1]
        if added:
            front = self.front_tokens.weight.to(hidden_states.dtype)
            hidden_states = torch.cat((front.expand(len(hidden_states), -1, -1), hidden_states), dim=1)
        mask, bias = self._visibility(hidden_states, layout, cache)
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
                **{CACHE: cache},
                position_ids=layout.position_ids,
                output_attentions=bool(output_attentions),
                **kwargs,
            )
            all_hidden.append(hidden_states)
            if output_attentions and weights is None:
                raise ConfigurationError(
                    f'attention {self.config._attn_implementation!r} keeps no weights; model.set_attn_implementation("eager")'
                )
            all_weights.append(weights)
        hidden_states = self.norm(hidden_states)
        all_hidden[-1] = hidden_states
        # -0 is 0: all of them.
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, added:][:, last])
        loss = None
        if labels is not None:
            if self.config.prefix_length:
                labels = labels.masked_fill(layout.inside_prefix(self.config.prefix_length), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: cache},
            hidden_states=tuple(all_hidden) if output_hidden_states else None,
            attentions=tuple(all_weights) if output_attentions else None,
        )

    def _visibility(
        self, hidden_states: Tensor, layout: Layout, cache: Cache | None
    ) -> tuple[Tensor | BlockMask | None, Tensor | None]:
        """The mask, and the bias of the scores where the attention function takes it beside the mask."""
        own = self.config._attn_implementation.startswith(implementation_name(""))
        mask = make_mask(
            self.config, hidden_states, layout, cache, window=self.config.window, prefix=self.config.prefix_length,
            explicit=self.position.biased and not own,
        )  # fmt: skip
        if not self.position.biased:
            return mask, None
        kv_len = layout.length if cache is None else cache.get_mask_sizes(layout.length, 0)[0]
        bias = self.position.score_bias(layout.position_ids, layout.key_positions(kv_len))
        if own:
            return mask, bias
        assert isinstance(mask, Tensor)  # it was asked for explicitly
        return fold_bias(mask, bias, hidden_states.dtype), None


AutoModelForCausalLM.register(SinkLMConfig, SinkLM)
