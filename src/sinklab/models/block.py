"""One block of a SinkLM: attention and feed-forward on the residual stream, with norms where the config places them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.forward_arguments import CACHE, given_cache
from sinklab.attention.operation import HeadShape, Operation, bind
from sinklab.models.feed_forward import FeedForward
from sinklab.models.model_config import SinkLMConfig
from sinklab.models.norms import NORMS, Norm
from sinklab.positions.base import PositionScheme, Rotation
from sinklab.registry import operations

__all__ = ["SinkLMAttention", "SinkLMLayer", "eager_attention_forward"]


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
        bind(self, operation, HeadShape(num_heads, num_kv_heads, head_dim, head_dim, config.hidden_size))

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
