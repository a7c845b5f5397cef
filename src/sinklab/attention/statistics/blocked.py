"""Column statistics, plain: blocks of whole rows, any operation; the definition that the faster ways are held to."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.operation import ROW_SUM, Operation
from sinklab.attention.statistics.tiles import bucket_starts, visible_counts
from sinklab.attention.visibility import Causal, Everything
from sinklab.registry import operations

__all__ = ["agrees", "blocked_statistics"]


def blocked_statistics(call: AttentionCall, needs: frozenset[str], num_buckets: int) -> Statistics:
    """Statistics from :meth:`AttentionCall.weights`, a block of queries at a time over the full width.

    See :func:`sinklab.attention.statistics.columns.column_statistics`.
    """
    operation = call.operation
    shape = (*call.queries.shape[:2],)
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    device = call.queries.device
    counted = None if call.all_counted else call.counted
    columns = torch.zeros(*shape, call.kv_len, dtype=dtype, device=device)
    share = columns if operation.normalized else torch.zeros_like(columns)
    starts = bucket_starts(call.q_len, num_buckets) if num_buckets else None
    buckets = torch.zeros(*shape, num_buckets, call.kv_len, dtype=dtype, device=device) if num_buckets else None
    fields: dict[str, list[Tensor]] = {name: [] for name in _row_fields(needs, operation)}

    for start, stop in call.blocks():
        scores = call.scores(start, stop)
        visible = call.visible.block(start, stop, 0, call.kv_len)
        weights = call.weights(start, stop, scores)
        if operation.is_softmax:
            # Entropy is of the weights divided by their sum. Under a null term that is the softmax without it, which keeps its
            # digits when the term leaves nothing of the weights themselves.
            sole = weights if call.sink_scores is None else operation.weights(scores, visible)
        else:
            total = weights.sum(dim=-1, keepdim=True)
            # The constant belongs to the proxy of Gu et al.; beside what a null mass leaves of a row it is not small.
            sole = weights / (total.clamp_min(torch.finfo(dtype).tiny) if operation.normalized else total + ROW_SUM)
        if counted is not None:
            padding = ~counted[:, None, start:stop, None]
            weights, sole = weights.masked_fill(padding, 0.0), sole.masked_fill(padding, 0.0)
        if "columns" in needs:
            columns += weights.sum(dim=2)
            if share is not columns:
                share += sole.sum(dim=2)
        if buckets is not None and starts is not None:
            for bucket in range(num_buckets):
                first, last = max(start, starts[bucket]) - start, min(stop, starts[bucket + 1]) - start
                if first < last:
                    buckets[:, :, bucket] += weights[:, :, first:last].sum(dim=2)
        for name, value in _row_values(call, fields.keys(), scores, visible, weights, sole, start, stop).items():
            zero = value if counted is None else value.masked_fill(~counted[:, None, start:stop], 0.0)
            fields[name].append(zero)

    statistics = Statistics(buckets=buckets, bucket_starts=starts)
    for name, parts in fields.items():
        setattr(statistics, name, torch.cat(parts, dim=2))
    if "columns" in needs:
        statistics.column_sum, statistics.column_share = columns, share
        statistics.column_count = visible_counts(call)[0]
    return statistics


def _row_fields(needs: frozenset[str], operation: Operation) -> list[str]:
    """Names of the row fields that the needs ask for and the operation has."""
    names = {"mass": ["row_mass"], "entropy": ["row_entropy"], "maximum": ["row_max"], "scores": ["score_mean"]}
    if operation.normalized:
        names["mass"].append("null_mass")
    if operation.is_softmax:
        names["log_sum_exp"] = ["log_sum_exp"]
    return [name for need, fields in names.items() if need in needs for name in fields]


def _row_values(
    call: AttentionCall,
    wanted: Collection[str],
    scores: Tensor,
    visible: Tensor,
    weights: Tensor,
    sole: Tensor,
    start: int,
    stop: int,
) -> dict[str, Tensor]:
    """The row fields of one block, each ``(batch, num_heads, block)``."""
    values: dict[str, Tensor] = {}
    if "log_sum_exp" in wanted:
        values["log_sum_exp"] = torch.logsumexp(scores.masked_fill(~visible, float("-inf")), dim=-1)
    if "null_mass" in wanted:
        values["null_mass"] = call.null_mass(start, stop, scores)
    if "row_mass" in wanted:
        values["row_mass"] = weights.sum(dim=-1)
    if "row_entropy" in wanted:
        values["row_entropy"] = torch.special.entr(sole).sum(dim=-1)
    if "row_max" in wanted:
        values["row_max"] = weights.amax(dim=-1)
    if "score_mean" in wanted:
        seen = visible.sum(dim=-1).clamp(min=1)
        values["score_mean"] = scores.masked_fill(~visible, 0.0).sum(dim=-1) / seen
    return {name: value for name, value in values.items() if name in wanted}


TOKENS, BUCKETS = 200, 8
"""Of the trial: no multiple of a tile, and buckets that end inside one."""


def agrees(
    compute: Callable[[AttentionCall, int], Statistics], device: torch.device, dtype: torch.dtype, head_dim: int, bound: float
) -> bool:
    """Whether column sums and a bucket map are those of the blocked reference.

    Tried on 2 × 4 heads (2 key-value heads) of 200 tokens, causal and full. One that refuses the shapes (RuntimeError) has not
    agreed.

    Args:
        compute: statistics of a call that has its log-sum-exp, with a map of so many buckets.
        bound: largest relative error of a sum of a hundredth or more; below that of the hundredth.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, heads, TOKENS, head_dim, generator=generator) for heads in (4, 2)]
    queries, keys = (tensor.to(device=device, dtype=dtype) for tensor in drawn)
    positions = torch.arange(TOKENS, device=device).expand(2, -1)
    for visible in (Causal(0, device), Everything(device)):
        call = AttentionCall(
            site=Site("self-check", 0),
            queries=queries,
            keys=keys,
            values=keys,
            scaling=head_dim**-0.5,
            visible=visible,
            operation=operations.make("softmax"),
            query_positions=positions,
            key_positions=positions,
            query_documents=torch.zeros_like(positions),
            key_documents=torch.zeros_like(positions),
        )
        reference = blocked_statistics(call, frozenset({"columns", "log_sum_exp"}), BUCKETS)
        call.log_sum_exp = reference.log_sum_exp
        try:
            result = compute(call, BUCKETS)
        except RuntimeError:
            return False
        for got, expected in ((result.column_sum, reference.column_sum), (result.buckets, reference.buckets)):
            assert got is not None
            assert expected is not None
            if not bool(((got - expected).abs() <= bound * expected.clamp(min=1e-2)).all()):
                return False
    return True
