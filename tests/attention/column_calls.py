"""Calls of every kind, and their column statistics from whole matrices in plain float64: what the fast ways are held to."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.visibility import Causal, Dense, Everything, Keys, Visibility, Window
from sinklab.registry import operations

ALL = frozenset({"columns", "mass", "log_sum_exp", "entropy", "maximum", "scores"})
FIELDS = tuple(field.name for field in dataclasses.fields(Statistics))


def make_call(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 4,
    q_len: int = 37,
    kv_len: int | None = None,
    head_dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    visible: Visibility | None = None,
    operation: dict | None = None,
    spread: float = 1.0,
    counted: Tensor | None = None,
    seed: int = 0,
    **fields: object,
) -> AttentionCall:
    """A call of random tensors; ``counted`` is boolean ``(batch, q_len)``."""
    kv_len = q_len if kv_len is None else kv_len
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    positions = (torch.arange(q_len) + kv_len - q_len).expand(batch, -1)
    if counted is not None:
        positions = torch.where(counted, positions, -1)
    key_positions = torch.arange(kv_len).expand(batch, -1)
    return AttentionCall(
        site=Site("layers.0.attention", 0),
        queries=draw(batch, heads, q_len, head_dim) * spread,
        keys=draw(batch, kv_heads, kv_len, head_dim),
        values=draw(batch, kv_heads, kv_len, value_dim or head_dim),
        scaling=head_dim**-0.5,
        visible=Causal(kv_len - q_len) if visible is None else visible,
        operation=operations.make(operation or {"name": "softmax"}),
        query_positions=positions,
        key_positions=key_positions,
        query_documents=torch.zeros_like(positions),
        key_documents=torch.zeros_like(key_positions),
        **fields,
    )


def dense_visible(call: AttentionCall, rule: str) -> Tensor:
    """The mask ``(batch, num_heads, q_len, kv_len)`` written out pair by pair from the words of the rule."""
    batch, heads = call.queries.shape[:2]
    query = torch.arange(call.q_len)[:, None] + call.kv_len - call.q_len
    key = torch.arange(call.kv_len)[None]
    causal = key <= query
    table = {
        "causal": causal,
        "full": torch.ones_like(causal),
        "window": causal & (query - key < WINDOW),
        "left padding": causal & (key >= PADDING),
        "right padding": causal & (key < call.kv_len - PADDING),
        "packed": causal & (key // DOCUMENT == query // DOCUMENT),
        "only query 0 blind": causal & (query > 0),
    }
    mask = table[rule].expand(batch, heads, -1, -1).clone()
    if rule.endswith("padding"):
        mask[0] = causal  # only the later samples are padded
    return mask


WINDOW, PADDING, DOCUMENT = 5, 9, 11


def cases() -> dict[str, tuple[AttentionCall, Tensor]]:
    """Name to a float64 call and its dense mask."""
    q_len, batch = 37, 2
    valid = torch.ones(batch, q_len, dtype=torch.bool)
    left, right = valid.clone(), valid.clone()
    left[1:, :PADDING], right[1:, -PADDING:] = False, False
    positions = torch.arange(q_len)
    packed = (positions[:, None] >= positions) & (positions[:, None] // DOCUMENT == positions // DOCUMENT)
    blind = (positions[:, None] >= positions) & (positions[:, None] > 0)
    per_head = torch.rand(batch, 4, q_len, q_len, generator=torch.Generator().manual_seed(5)) < 0.4
    bias = torch.randn(1, 4, q_len, q_len, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    sink_per_query = torch.randn(batch, 4, q_len, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def sink(value: float) -> Tensor:
        return torch.full((1, 4, 1), value, dtype=torch.float64)

    calls: dict[str, tuple[AttentionCall, str | Tensor]] = {
        "causal": (make_call(), "causal"),
        "full": (make_call(visible=Everything()), "full"),
        "window": (make_call(visible=Causal() & Window(WINDOW)), "window"),
        "left padding": (make_call(visible=Causal() & Keys(left), counted=left), "left padding"),
        "right padding": (make_call(visible=Causal() & Keys(right), counted=right), "right padding"),
        "packed documents": (make_call(visible=Dense(packed[None, None])), "packed"),
        "mask per sample and head": (make_call(visible=Dense(per_head)), per_head),
        "a query that sees nothing": (make_call(visible=Dense(blind[None, None])), "only query 0 blind"),
        "grouped queries": (make_call(kv_heads=2), "causal"),
        "one key-value head": (make_call(kv_heads=1), "causal"),
        "values of another size": (make_call(head_dim=12, value_dim=5), "causal"),
        "cached keys": (make_call(q_len=13, kv_len=29), "causal"),
        "one decoding step": (make_call(q_len=1, kv_len=29), "causal"),
        "sink logit 0": (make_call(sink_scores=sink(0.0)), "causal"),
        "sink logit +20": (make_call(sink_scores=sink(20.0)), "causal"),
        "sink logit -20": (make_call(sink_scores=sink(-20.0)), "causal"),
        "sink logit per query": (make_call(sink_scores=sink_per_query), "causal"),
        "sink logit and a blind query": (
            make_call(sink_scores=sink(1.0), visible=Dense(blind[None, None])),
            "only query 0 blind",
        ),
        "huge scores": (make_call(spread=300.0), "causal"),
        "soft-cap": (make_call(softcap=1.5, spread=3.0), "causal"),
        "position bias": (make_call(bias=bias), "causal"),
        "sigmoid": (make_call(operation={"name": "sigmoid", "bias": -1.0}), "causal"),
    }
    return {name: (call, dense_visible(call, rule) if isinstance(rule, str) else rule) for name, (call, rule) in calls.items()}


def dense_weights(call: AttentionCall, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and weights ``(batch, num_heads, q_len, kv_len)`` from whole float64 matrices."""
    queries, keys = call.queries.double(), call.keys.double().repeat_interleave(call.groups, dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", queries, keys) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.double()
    if call.operation.name == "sigmoid":
        return scores, torch.where(visible, 1 / (1 + torch.exp(-(scores + call.operation.bias))), 0.0)
    if call.operation.name != "softmax":
        return scores, call.operation.weights(scores, visible)
    total = torch.logsumexp(torch.where(visible, scores, -torch.inf), dim=-1)
    if call.sink_scores is not None:
        total = torch.logaddexp(total, call.sink_scores.double().expand_as(total))
    return scores, torch.where(visible, torch.exp(scores - total[..., None]), 0.0)


def dense_oracle(call: AttentionCall, visible: Tensor) -> dict[str, Tensor | None]:
    """Every field of the statistics from whole float64 matrices."""
    scores, weights = dense_weights(call, visible)
    counted = (call.query_positions >= 0)[:, None, :, None]
    softmax = call.operation.name == "softmax"
    log_sum_exp: Tensor | None = None
    normal, null = weights / (weights.sum(-1, keepdim=True) + 1e-8), None
    if softmax:
        log_sum_exp = torch.logsumexp(torch.where(visible, scores, -torch.inf), dim=-1)
        normal = torch.where(visible, torch.exp(scores - log_sum_exp[..., None]), 0.0)
        sink = torch.full_like(log_sum_exp, -torch.inf) if call.sink_scores is None else call.sink_scores.double()
        null = torch.exp(sink - torch.logaddexp(log_sum_exp, sink.expand_as(log_sum_exp)))
    weights, normal = weights * counted, normal * counted
    rows = counted[..., 0]
    return {
        "column_sum": weights.sum(2),
        "column_share": (weights if call.operation.normalized else normal).sum(2),
        "column_count": (visible & counted).sum(2).double(),
        "row_mass": weights.sum(3),
        "null_mass": None if null is None else torch.where(rows, null.nan_to_num(), 0.0),
        "log_sum_exp": None if log_sum_exp is None else torch.where(rows, log_sum_exp, 0.0),
        "row_entropy": -torch.where(normal > 0, normal * normal.log(), 0.0).sum(3),
        "row_max": weights.amax(3),
        "score_mean": torch.where(visible, scores, 0.0).sum(3) / visible.sum(3).clamp(min=1) * rows,
    }


def with_log_sum_exp(call: AttentionCall, visible: Tensor) -> AttentionCall:
    """The call with the log-sum-exp that a kernel would have given, in the dtype of the call's arithmetic."""
    everything = dataclasses.replace(call, query_positions=call.query_positions.clamp(min=0))
    value = dense_oracle(everything, visible)["log_sum_exp"]
    assert value is not None
    return dataclasses.replace(call, log_sum_exp=value.to(torch.promote_types(call.queries.dtype, torch.float32)))
