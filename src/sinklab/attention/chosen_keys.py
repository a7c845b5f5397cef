"""The scores and weights of a few chosen keys for every query: what is needed to watch a sink once its position is known."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.operation import leaves_digits, repeat_groups

_BLOCK_NUMBERS = 1 << 22
"""Numbers per intermediate tensor: 16 MiB in float32 whatever the length."""
_FEW = 4
"""Distinct keys for each key of a query up to which all queries are multiplied with all of them."""
_TILE = 128
"""Queries and keys of a block of the diagonal."""


def keys_of_document(call: AttentionCall, *positions: int) -> Tensor:
    """Indices of the keys that stand at ``positions`` in the document of each query.

    Returns:
        int64 ``(batch, q_len, len(positions))``; -1 for queries of padding, and where the key is not there (document too
        short, or evicted).
    """
    wanted = torch.tensor(positions, device=call.key_positions.device)
    return _first_keys(call, call.key_positions[:, None] == wanted[:, None])


def first_keys(call: AttentionCall, chosen: Tensor) -> Tensor:
    """Index of the first of some keys, boolean ``(batch, kv_len)``, in the document of each query: int64 ``(batch, q_len)``, -1
    for queries of padding, and where the document has none of the keys."""
    return _first_keys(call, chosen[:, None])[..., 0]


def _first_keys(call: AttentionCall, chosen: Tensor) -> Tensor:
    """The same for several choices ``(batch, choices, kv_len)`` at once; ``(batch, q_len, choices)``."""
    documents, kv_len = call.key_documents, call.kv_len
    size = max(int(documents.max()) + 1 if documents.numel() else 0, 1)
    index = torch.arange(kv_len, device=documents.device).masked_fill(~chosen | (documents < 0)[:, None], kv_len)
    outside = (call.query_documents < 0) | (call.query_documents >= size)
    if size == 1 and kv_len:  # rows are not packed
        first = index.amin(dim=2, keepdim=True).expand(-1, -1, call.q_len)
    else:
        table = documents.new_full((*chosen.shape[:2], size), kv_len)
        table = table.scatter_reduce(2, documents.clamp(min=0)[:, None].expand_as(chosen), index, "amin")
        first = table.gather(2, call.query_documents.clamp(0, size - 1)[:, None].expand(-1, chosen.shape[1], -1))
    return first.masked_fill(outside[:, None] | (first == kv_len), -1).transpose(1, 2)


def scores_of_keys(call: AttentionCall, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of a few keys per query, scaled, capped and biased, and whether the query sees them.

    Args:
        indices: int64 ``(batch, q_len, num_keys)``; -1 where there is none.

    Returns:
        float32 (or float64) scores and boolean, ``(batch, num_heads, q_len, num_keys)``; scores are 0 where not visible.
    """
    batch = call.queries.shape[0]
    distinct = indices.unique()
    distinct = distinct[distinct >= 0]
    if distinct.numel() <= _FEW * indices.shape[2]:
        scores, visible = _few_keys(call, indices, distinct)
    else:
        scores, visible = _gathered_keys(call, indices)
    dtype = scores.dtype
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.bias is not None:
        bias = call.bias.expand(batch, -1, -1, -1)
        scores = scores + bias.gather(3, indices.clamp(min=0)[:, None].expand(-1, bias.shape[1], -1, -1)).to(dtype)
    return scores.masked_fill(~visible, 0.0), visible


def _at_once(call: AttentionCall) -> int:
    """Queries of a block."""
    return max(1, _BLOCK_NUMBERS // max(1, call.queries.shape[:2].numel() * call.queries.shape[3]))


def _few_keys(call: AttentionCall, indices: Tensor, distinct: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled scores and visibility where few ``distinct`` keys are meant by all queries: one product with these."""
    batch, num_heads, q_len, _ = call.queries.shape
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    if not distinct.numel():
        scores = torch.zeros(batch, num_heads, q_len, indices.shape[2], dtype=dtype, device=call.queries.device)
        return scores, torch.zeros_like(scores, dtype=torch.bool)
    chosen = call.keys[:, :, distinct].to(dtype).transpose(2, 3)
    parts = []
    for queries in call.queries.split(_at_once(call), dim=2):
        grouped = queries.to(dtype).reshape(batch, call.keys.shape[1], -1, queries.shape[3])
        parts.append(torch.matmul(grouped, chosen).view(batch, num_heads, queries.shape[2], -1))
    products = torch.cat(parts, dim=2) * call.scaling
    seen = call.visible.pairs(torch.arange(q_len, device=distinct.device), distinct)
    column = torch.searchsorted(distinct, indices.clamp(min=int(distinct[0])).contiguous())[:, None]
    scores = products.gather(3, column.expand(-1, num_heads, -1, -1))
    visible = seen.expand(batch, num_heads, -1, -1).gather(3, column.expand(-1, num_heads, -1, -1))
    return scores, visible & (indices >= 0)[:, None]


def _gathered_keys(call: AttentionCall, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The same where many keys are meant, as in packed rows: every query with a copy of its own keys."""
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    batch, num_heads, q_len, head_dim = call.queries.shape
    scores = torch.zeros(batch, num_heads, *indices.shape[1:], dtype=dtype, device=call.queries.device)
    visible = torch.zeros_like(scores, dtype=torch.bool)
    step = _at_once(call)
    for start in range(0, q_len, step):
        block = slice(start, min(start + step, q_len))
        queries = call.queries[:, :, block].to(dtype).unflatten(1, (call.keys.shape[1], call.groups))
        for column in range(indices.shape[2]):
            here = indices[:, block, column]
            # One key vector per query, gathered per key-value head: linear in the length for any packing and padding.
            where = here.clamp(min=0)[:, None, :, None].expand(-1, call.keys.shape[1], -1, head_dim)
            keys = call.keys.gather(2, where).to(dtype).unsqueeze(2)
            scores[:, :, block, column] = (queries * keys).sum(-1).flatten(1, 2) * call.scaling
            for key in here[here >= 0].unique().tolist():
                seen = call.visible.block(start, block.stop, key, key + 1)[..., 0]
                visible[:, :, block, column] |= seen & (here == key)[:, None]
    return scores, visible


def weights_of_keys(call: AttentionCall, indices: Tensor, log_sum_exp: Tensor | None) -> Tensor:
    """Weights of a few keys per query, float32 (or float64) ``(batch, num_heads, q_len, num_keys)``; 0 where not visible.

    Args:
        indices: int64 ``(batch, q_len, num_keys)``; -1 where there is none.
        log_sum_exp: of :class:`~sinklab.attention.call.Statistics`. With it a weight costs one dot product per query;
            operations without it, and scores so large that it has too few digits, are evaluated whole, a block of queries at
            a time.
    """
    if log_sum_exp is not None and leaves_digits(log_sum_exp):
        scores, visible = scores_of_keys(call, indices)
        total = log_sum_exp.to(scores.dtype)
        if call.sink_scores is not None:
            total = torch.logaddexp(total, call.sink_scores.to(scores.dtype))
        return torch.exp(scores - total[..., None]).masked_fill(~visible, 0.0)
    blocks = []
    for start, stop in call.blocks():
        weights = call.weights(start, stop)
        here = indices[:, None, start:stop].expand(-1, call.num_heads, -1, -1)
        blocks.append(weights.gather(3, here.clamp(min=0)).masked_fill(here < 0, 0.0))
    return torch.cat(blocks, dim=2)


def stands_on_no_key(call: AttentionCall) -> bool:
    """Whether no query of a call has a key of its own token.

    In cross-attention the keys are those of another text; and where a model merges keys (the spatial reduction of SegFormer),
    so that there are fewer keys than queries, a key is of many tokens.
    """
    return call.site.kind == "cross" or call.kv_len < call.q_len


def weights_on_own_keys(call: AttentionCall, log_sum_exp: Tensor | None) -> Tensor:
    """Weight of every query on the key of its own token, one of the last keys, float32 or wider ``(batch, num_heads, q_len)``.

    0 where it has none (:func:`stands_on_no_key`). ``log_sum_exp`` is as for :func:`weights_of_keys`.
    """
    if stands_on_no_key(call):
        return call.queries.new_zeros(call.queries.shape[:3], dtype=torch.promote_types(call.queries.dtype, torch.float32))
    before = call.kv_len - call.q_len
    if log_sum_exp is None or not leaves_digits(log_sum_exp):
        own = torch.arange(before, call.kv_len, device=call.keys.device).expand(call.queries.shape[0], -1)
        return weights_of_keys(call, own[..., None], None)[..., 0]
    keys = repeat_groups(call.keys[:, :, before:], call.groups).to(log_sum_exp.dtype)
    scores = (call.queries.to(log_sum_exp.dtype) * keys).sum(-1, keepdim=True) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.bias is not None:
        scores = scores + call.bias.diagonal(before, 2, 3)[..., None].to(scores.dtype)
    total = log_sum_exp
    if call.sink_scores is not None:
        total = torch.logaddexp(total, call.sink_scores.to(total.dtype))
    visible = [
        call.visible.block(start, stop, start + before, stop + before).diagonal(dim1=2, dim2=3)
        for start in range(0, call.q_len, _TILE)
        for stop in [min(start + _TILE, call.q_len)]
    ]
    return torch.exp(scores[..., 0] - total).masked_fill(~torch.cat(visible, dim=-1), 0.0)
