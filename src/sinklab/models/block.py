"""The config and the blocks of a SinkLM."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.folding import watch
from sinklab.attention.host_arguments import CACHE, given_cache
from sinklab.attention.operation import ATTRIBUTE, HeadShape, Operation, bind
from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.positions.base import PositionScheme, Rotation
from sinklab.registry import operations

FOREIGN_FIELDS = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig)) | {
    # What transformers takes besides its declared fields, or writes into config.json.
    *("model_type", "name_or_path", "attn_implementation", "experts_implementation", "output_attentions", "torch_dtype"),
    *("num_labels", "use_cache", "auto_map", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
}

SAVED_AS = {"prefix": "prefix_length"}
"""Fields of the architecture that are called otherwise in a config. Pipelines of transformers take the ``prefix`` of a config
for a text, and put it in front of every prompt."""


class SinkLMConfig(PreTrainedConfig):
    """Config of a :class:`SinkLM`: the fields of :class:`~sinklab.models.architecture.Architecture`, flat.

    Its ``prefix`` is ``prefix_length`` here, and taken under either name. ``head_dim`` and ``num_key_value_heads`` are
    resolved. The operation and the position scheme are saved with the checkpoint, because transformers does not save the name
    of an attention implementation. Unknown fields, and values that a field does not take, are a :class:`ConfigurationError`.
    """

    model_type = "sinklm"
    keys_to_ignore_at_inference = [CACHE]

    def __init__(self, **fields: object) -> None:
        fields |= {name: fields.pop(saved) for name, saved in SAVED_AS.items() if saved in fields}
        folded = fields.pop("folded", None)  # of each layer the key–value heads whose sinks are folded, for sinklab.fold_sinks
        self.folded = folded if isinstance(folded, list) else None
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
            setattr(self, SAVED_AS.get(name, name), value)
        self.head_dim = architecture.head_size
        self.num_key_value_heads = architecture.kv_heads
        super().__init__(**fields)

    @classmethod
    def from_architecture(cls, architecture: Architecture, **fields: object) -> Self:
        """The config of an architecture; ``fields`` are those of transformers, such as ``bos_token_id``."""
        return cls(**architecture.model_dump(), **fields)

    @property
    def architecture(self) -> Architecture:
        """The architecture, validated anew: attributes of a config can be set to anything."""
        return Architecture(**{name: getattr(self, SAVED_AS.get(name, name)) for name in Architecture.model_fields})


AutoConfig.register("sinklm", SinkLMConfig)


class Norm(nn.Module):
    """A norm over the last axis of ``size`` with a learned ``weight``, whose dtype comes out; ``eps`` is added under a root."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        """Initial values; called for parameters that are not read from a checkpoint."""
        nn.init.ones_(self.weight)


class RMSNorm(Norm):
    """``x / sqrt(mean(x²) + eps) · weight``; statistics in float32. Zhang & Sennrich 2019 (arXiv 1910.07467)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        # torch computes in float32 inside, without a float32 copy; of mixed dtypes it would make a slow composition.
        return nn.functional.rms_norm(hidden_states.to(self.weight.dtype), (self.size,), self.weight, self.eps)


class LayerNorm(Norm):
    """``(x - mean(x)) / sqrt(var(x) + eps) · weight + bias``; statistics in float32. Ba et al. 2016 (arXiv 1607.06450)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.layer_norm(hidden_states.to(self.weight.dtype), (self.size,), self.weight, self.bias, self.eps)


NORMS: dict[str, type[Norm]] = {"rms_norm": RMSNorm, "layer_norm": LayerNorm}
"""The values of ``Architecture.norm``."""


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "relu": (nn.functional.relu, False),
    "gelu": (nn.functional.gelu, False),
    "swish": (nn.functional.silu, False),
    "reglu": (nn.functional.relu, True),
    "geglu": (nn.functional.gelu, True),
    "swiglu": (nn.functional.silu, True),
}
"""The values of ``Architecture.feed_forward``: the activation, and whether it is the gate of a third map."""


class FeedForward(nn.Module):
    """``down(act(up(x)))``, or with a gate ``down(act(gate(x)) · up(x))``; no biases. Shazeer 2020 (arXiv 2002.05202).

    GELU is the exact one. The width is ``intermediate_size`` in both forms, as in Gu et al. 2024 (arXiv 2410.10781), so the
    plain form has a third fewer parameters.
    """

    def __init__(self, kind: str, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.activation, gated = ACTIVATIONS[kind]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(batch, seq_len, hidden_size)`` to the same shape."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(hidden_states)))
        return self.down_proj(self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
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
    operation: Operation

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
        operation = operations.make(config.operation)
        self.needs_layer_input = operation.needs_layer_input
        folded = None if config.folded is None else tuple(config.folded[layer_idx])
        sources = [f"{part}:btn:0:{head_dim}" for part in ("q_proj", "k_proj")]
        bind(
            self, operation, HeadShape(num_heads, num_kv_heads, head_dim, head_dim, config.hidden_size, None, folded, *sources)
        )
        if operation.folds:
            watch(self, getattr(self, ATTRIBUTE))

    def forward(
        self,
        hidden_states: Tensor,
        scheme: PositionScheme,
        rotation: Rotation | None,
        attention_mask: object = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        split = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = self.q_proj(hidden_states).view(split).transpose(1, 2)
        keys = self.k_proj(hidden_states).view(split).transpose(1, 2)
        values = self.v_proj(hidden_states).view(split).transpose(1, 2)
        if rotation is not None:
            queries, keys = scheme.rotate(queries, keys, rotation)
        cache = given_cache(kwargs)
        kwargs.pop(CACHE, None)  # it comes by the name under which transformers takes it from layers that are computed again
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
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

    def forward(self, hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
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
