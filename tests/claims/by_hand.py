"""Queries, keys, values and attention matrices of a SinkLM without positions, computed from its projections alone."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from sinklab.models.language_model import SinkLM


@torch.no_grad()
def seen(model: SinkLM, rows: Tensor) -> list[dict[str, Tensor]]:
    """By layer: ``queries``, ``keys``, ``values`` ``(rows, heads, length, head_dim)``, keys and values repeated for grouped
    queries, the outputs ``attention`` and ``layer``, and ``weights``, ``nothing`` of the layer's operation."""
    inputs: list[Tensor] = []
    found: list[dict[str, Tensor]] = []
    with contextlib.ExitStack() as stack:
        for layer in model.layers:
            found.append({})
            hooks = (
                layer.input_layernorm.register_forward_hook(lambda _, args, output: inputs.append(output)),
                layer.self_attn.register_forward_hook(lambda _, args, output, into=found[-1]: into.update(attention=output[0])),
                layer.register_forward_hook(lambda _, args, output, into=found[-1]: into.update(layer=output[0])),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        model(input_ids=rows, use_cache=False)
    for layer, hidden, into in zip(model.layers, inputs, found, strict=True):
        attention = layer.self_attn
        for name in ("q", "k", "v"):
            projected = getattr(attention, f"{name}_proj")(hidden).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            heads = 1 if name == "q" else attention.num_key_value_groups
            into[{"q": "queries", "k": "keys", "v": "values"}[name]] = projected.repeat_interleave(heads, dim=1)
        into["weights"], into["nothing"] = _weights(attention, into["queries"], into["keys"])
    return found


def _weights(attention, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``(rows, heads, length, length)`` and mass on nothing ``(rows, heads, length)``."""
    scores = queries @ keys.transpose(2, 3) / attention.head_dim**0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    name = attention.operation.name
    if name == "sigmoid":
        return torch.sigmoid(scores).masked_fill(hidden, 0.0), torch.zeros(scores.shape[:3])
    if name == "relu":
        counted = (torch.arange(1.0, scores.shape[-1] + 1) - attention.operation.uncounted).clamp(min=1)
        return torch.relu(scores).masked_fill(hidden, 0.0) / counted[:, None], torch.zeros(scores.shape[:3])
    scores = scores.masked_fill(hidden, float("-inf"))
    if name in ("softmax", "sink_token", "gated", "gated_heads"):
        return torch.softmax(scores, dim=-1), torch.zeros(scores.shape[:3])
    state = attention.operation_state
    if name == "key_bias":
        extra = (queries * state.key[:, None]).sum(-1, keepdim=True) / attention.head_dim**0.5
    else:
        assert name == "sink_logit"
        extra = state.sink_logit[None, :, None, None].expand(*scores.shape[:3], 1)
    whole = torch.softmax(torch.cat((extra, scores), dim=-1), dim=-1)
    return whole[..., 1:], whole[..., 0]
