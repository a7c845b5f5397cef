"""The decode path: one query against a cache in two products, its heads grouped so that no key or value is repeated.

Query heads that share a key head become columns of one product, ``(kv_len, head_dim) · (head_dim, groups)``. The plain path
copies the whole cache for that, once for every query head. The stock CPU kernel, made for blocks of queries, needs several
times as long in bfloat16, and in float32 it is slower where keys come from memory; they are read fastest as the left factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.attention.operation import Inputs, Operation

_HAS_AMX = torch.cpu._is_amx_tile_supported()

_LONG = 256
"""Keys from which on the saved copies count for more than the calls of two products."""
LARGE = 2**20
"""Bytes of keys from which on the stock kernel is slower for one query, in float32."""


def obstacle(operation: Operation, inputs: Inputs) -> str | None:
    """Why this path cannot serve the call, or ``None``."""
    if inputs.q_len != 1:
        return f"it takes one query, and there are {inputs.q_len}"
    if not inputs.kv_len:
        return "there is no key"
    if inputs.causal and inputs.kv_len > 1:
        return "a causal mask without an offset shows the only query the first key alone"
    if type(operation).head_outputs is not Operation.head_outputs:
        return "the operation computes its head outputs in a way of its own"
    return inputs.plain_scores()


def worthwhile(operation: Operation, inputs: Inputs) -> bool:
    """Whether it beats the others, as measured on one core without AMX."""
    queries, keys = inputs.queries, inputs.keys
    if queries.device.type != "cpu" or queries.dtype == torch.float16 or inputs.kv_len < _LONG:
        return False
    if operation.is_softmax and queries.dtype == torch.bfloat16:
        return not _HAS_AMX
    stock = operation.is_softmax and type(operation).null_scores is Operation.null_scores
    repeats = queries.shape[1] > keys.shape[1] and not (stock and inputs.values.shape[3] == queries.shape[3])
    return repeats or keys.nbytes >= LARGE


def head_outputs(operation: Operation, inputs: Inputs) -> Tensor:
    """Head outputs ``(batch, num_heads, 1, value_dim)``, differentiable; temporary memory ``O(batch · num_heads · kv_len)``."""
    queries, keys = operation.features(inputs.queries, inputs.keys, inputs.state)
    values, visible = inputs.values, inputs.visible
    null_scores = operation.null_scores(queries, inputs.scaling, inputs.state)
    # Under autocast a feature map may have left the common dtype.
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)
    batch, num_heads, _, head_dim = queries.shape
    heads = (batch, keys.shape[1], num_heads // keys.shape[1])  # query heads of a group stand where queries stand otherwise
    if null_scores is not None:
        null_scores = null_scores.expand(batch, num_heads, 1).reshape(heads)
    if visible is not None:
        visible = visible[(None,) * (4 - visible.ndim)]
        if visible.shape[1] > 1:
            visible = visible.expand(batch, -1, -1, -1).reshape(*heads, -1)
    scores = torch.matmul(keys, queries.reshape(*heads, head_dim).transpose(2, 3)).transpose(2, 3) * inputs.scaling
    null_mass: Tensor | None
    if operation.is_softmax and null_scores is not None and visible is None:  # one more score in each row
        scores = torch.cat((scores, null_scores[..., None].to(scores.dtype)), dim=-1)
        shares = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, null_mass = shares[..., :-1], shares[..., -1]
    else:
        weights = operation.weights(scores, visible, null_scores)
        null_mass = operation.null_mass(scores, visible, null_scores)
    outputs = torch.matmul(weights.to(values.dtype), values).reshape(batch, num_heads, 1, -1)
    return operation.finish(outputs, None if null_mass is None else null_mass.reshape(batch, num_heads, 1), inputs.state)
