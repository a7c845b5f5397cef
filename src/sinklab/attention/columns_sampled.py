"""Weights of every query on a few keys, and of a few queries on every key: what is enough once the sinks are known."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.columns_blocked import rows_per_block
from sinklab.attention.visibility import Visibility
from sinklab.errors import ConfigurationError

__all__ = ["estimate_columns", "known_key_weights"]

_Z = 1.959964
"""Quantile of the normal distribution for a two-sided 95 % interval."""


@torch.no_grad()
def known_key_weights(call: AttentionCall, log_sum_exp: Tensor, key_index: Tensor) -> Tensor:
    """Weights of every query on given keys, ``exp(score − LSE)``, in O(q_len · num_keys · head_dim).

    Args:
        call: a softmax call; soft-cap, bias and sink logits are honoured.
        log_sum_exp: ``(batch, num_heads, q_len)`` over all visible keys, without the sink logit, which is added here.
        key_index: int64 ``(num_keys,)`` or ``(batch, num_keys)``: indices into the keys of the call.

    Returns:
        Float32 (float64 for a float64 call) ``(batch, num_heads, q_len, num_keys)``; exactly 0 where the key is hidden and in
        rows of padding.

    Raises:
        ConfigurationError: the operation is not a softmax, no key is named, or a key index lies outside the call.
    """
    if call.operation.name != "softmax":
        raise ConfigurationError(
            f"{call.site.module}: weights on known keys need a softmax, the operation is {call.operation.name!r}; "
            "use column_statistics with buckets instead"
        )
    batch = call.queries.shape[0]
    index = key_index.to(call.queries.device).expand(batch, -1)
    if not index.numel():
        raise ConfigurationError(f"{call.site.module}: key_index is empty; name at least one key")
    if not 0 <= int(index.min()) <= int(index.max()) < call.kv_len:
        raise ConfigurationError(
            f"{call.site.module}: key index {int(index.min())} to {int(index.max())} outside the {call.kv_len} keys of the call"
        )
    keys = torch.gather(call.keys, 2, index[:, None, :, None].expand(-1, call.keys.shape[1], -1, call.keys.shape[3]))
    bias = call.bias
    if bias is not None:
        places = index[:, None, None].expand(-1, bias.shape[1], bias.shape[2], -1)
        bias = torch.gather(bias.expand(batch, -1, -1, -1), 3, places)
    with torch.autocast(call.queries.device.type, enabled=False):
        scores = dataclasses.replace(call, keys=keys, bias=bias).scores(0, call.q_len)
    denominator = log_sum_exp.to(scores.dtype)
    if call.sink_scores is not None:
        denominator = torch.logaddexp(denominator, call.sink_scores.to(scores.dtype))
    visible = _visible_columns(call, index) & call.counted[:, None, :, None]
    return torch.exp(scores.sub_(denominator[..., None])).masked_fill_(~visible, 0.0)


def _visible_columns(call: AttentionCall, index: Tensor) -> Tensor:
    """Visibility of single keys ``(batch, num_keys)``: boolean ``(batch or 1, heads or 1, q_len, num_keys)``."""
    keys, place = index.unique(return_inverse=True)
    blocks = [call.visible.block(0, call.q_len, key, key + 1) for key in keys.tolist()]
    columns = torch.cat(blocks, dim=3)
    if bool((index == index[:1]).all()):
        return columns[..., place[0]]
    columns = columns.expand(len(index), -1, -1, -1)
    return torch.gather(columns, 3, place[:, None, None].expand(-1, *columns.shape[1:3], -1))


@torch.no_grad()
def estimate_columns(call: AttentionCall, num_queries: int, seed: int) -> tuple[Tensor, Tensor]:
    """Column means estimated from some of the queries, with an interval; for calls too long for the exact pass.

    One query is drawn from each of ``num_queries`` equal strata of consecutive queries. The half width is
    ``1.96 · s / √n + 1.96² / n`` with ``s`` the standard deviation over the n drawn queries that see the key: strata make the
    first term conservative, and the second, the rule of three, covers a weight of one that the draw may have missed.

    Args:
        call: any call.
        num_queries: how many queries to draw; the cost is that share of the blocked way's.
        seed: seed of the draw.

    Returns:
        Mean weight over the counted queries that see the key, and half width of its 95 % interval, both
        ``(batch, num_heads, kv_len)`` in [0, 1]. A key that no drawn query sees has mean 0 and half width 1: unknown.

    Raises:
        ConfigurationError: not 1 ≤ num_queries ≤ q_len.
    """
    if not 1 <= num_queries <= call.q_len:
        raise ConfigurationError(f"num_queries must lie between 1 and the {call.q_len} queries of the call, got {num_queries}")
    generator = torch.Generator().manual_seed(seed)
    edges = torch.arange(num_queries + 1) * call.q_len // num_queries
    drawn = edges[:-1] + (torch.rand(num_queries, generator=generator) * (edges[1:] - edges[:-1])).long()
    sample = _only(call, drawn.to(call.queries.device))
    shape = (*call.queries.shape[:2], call.kv_len)
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    total, square, count = (torch.zeros(shape, dtype=dtype, device=call.queries.device) for _ in range(3))
    rows = rows_per_block(sample)
    with torch.autocast(call.queries.device.type, enabled=False):
        for start in range(0, num_queries, rows):
            stop = min(start + rows, num_queries)
            counted = sample.counted[:, None, start:stop, None]
            weights = sample.weights(start, stop).masked_fill(~counted, 0.0)
            total += weights.sum(dim=2)
            square += (weights * weights).sum(dim=2)
            count += (sample.visible.block(start, stop, 0, call.kv_len) & counted).sum(dim=2)
    mean = total / count.clamp(min=1)
    variance = (square / count.clamp(min=1) - mean * mean).clamp(min=0) * count / (count - 1).clamp(min=1)
    half_width = _Z * (variance / count.clamp(min=1)).sqrt() + _Z**2 / count.clamp(min=1)
    return mean, half_width.clamp(max=1.0)


def _only(call: AttentionCall, queries: Tensor) -> AttentionCall:
    """The call with only some of its queries."""
    sink = call.sink_scores
    return dataclasses.replace(
        call,
        queries=call.queries[:, :, queries],
        visible=_SomeQueries(call.visible, queries.tolist()),
        query_positions=call.query_positions[:, queries],
        query_documents=call.query_documents[:, queries],
        bias=None if call.bias is None else call.bias[:, :, queries],
        sink_scores=sink if sink is None or sink.shape[2] == 1 else sink[:, :, queries],
        log_sum_exp=None if call.log_sum_exp is None else call.log_sum_exp[:, :, queries],
        head_outputs=None,
        residual=None,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _SomeQueries(Visibility):
    """A rule restricted to some queries, which it renumbers."""

    rule: Visibility
    queries: list[int]

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        rows = [self.rule.block(query, query + 1, key_start, key_stop) for query in self.queries[query_start:query_stop]]
        return torch.cat(rows, dim=2)
