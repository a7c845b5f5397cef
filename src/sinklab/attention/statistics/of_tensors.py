"""attention_statistics(): what attention of two plain tensors looks like, in linear memory; no model is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.positions import Positions
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.visibility import Causal, Dense, Everything, Keys, Visibility, Window
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import operations
from sinklab.results.environment import require_number

_NEEDS = frozenset({"columns", "mass", "log_sum_exp", "entropy", "maximum"})


def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Statistics:
    """Attention received by every key, and entropy, maximum and log-sum-exp of every row, without the matrix.

    ``weights = softmax(scale · q·kᵀ)`` over the keys that a query sees. Memory is O(queries + keys) for each head (a ``mask``
    of four dimensions is as large as it is); the arithmetic is float32, or float64 for float64 tensors. Nothing is
    differentiable. On a CPU two passes over tiles of scores are made, elsewhere blocks of rows.

    Args:
        q: ``(batch, heads, queries, width)``, after rotary embedding.
        k: ``(batch, kv_heads, keys, width)``; ``heads`` is a multiple of ``kv_heads`` (grouped queries).
        causal: a query sees its own key and those before it; with fewer queries than keys the queries are the last ones.
        scale: factor on the scores; ``1 / sqrt(width)`` by default.
        window: a query sees this many keys up to its own one; only with ``causal``.
        mask: boolean, true where visible: ``(batch, keys)`` for padding, or ``(batch or 1, heads or 1, queries, keys)``.
        query_mask: boolean ``(batch, queries)``, false for queries that are padding: in no column, and their rows are 0.
        sink_logits: ``(heads,)``, one more score in the denominator of every row; its share is ``null_mass``.

    Returns:
        :class:`~sinklab.attention.call.Statistics` with ``column_sum`` (attention received), ``column_count`` (queries that see
        the key; their ratio is the mean weight), ``row_mass``, ``null_mass``, ``row_entropy`` in nats, ``row_max`` and
        ``log_sum_exp`` (natural, without the sink logit; minus infinity where a row sees no key).

    Raises:
        InputError: tensors that are no queries and keys of one attention: shapes, dtypes, devices, NaN.
        ConfigurationError: a ``scale`` that is no finite number, a ``window`` that is no whole number, below 1 or without
            ``causal``.
    """
    _check_tensors(q, k)
    if scale is not None:
        require_number("`scale`", scale)
        if not math.isfinite(scale):
            raise ConfigurationError(f"`scale` is {scale}; expected a finite number, or None for 1 / sqrt(width)")
    if causal and q.shape[2] > k.shape[2]:
        raise InputError(
            f"`q` has {q.shape[2]} queries and `k` {k.shape[2]} keys; causal attention has as many keys or more, the queries "
            "being the last ones: give the keys before them too, or causal=False"
        )
    visible = _rule(q, k, causal, window, mask)
    q, k = q.detach(), k.detach()
    batch, _, q_len, width = q.shape
    keys = Positions.plain(batch, k.shape[2], q.device)
    queries = Positions.plain(batch, q_len, q.device, max(k.shape[2] - q_len, 0))
    positions = queries.positions
    if query_mask is not None:
        positions = positions.masked_fill(~_boolean("query_mask", query_mask, q, [(batch, q_len)]), -1)
    call = AttentionCall(
        site=Site(module="attention_statistics", layer=0),
        queries=q,
        keys=k,
        values=k,
        scaling=1.0 / math.sqrt(width) if scale is None else float(scale),
        visible=visible,
        operation=operations["softmax"](),
        query_positions=positions,
        key_positions=keys.positions,
        query_documents=queries.documents,
        key_documents=keys.documents,
        sink_scores=None if sink_logits is None else _sink_scores(sink_logits, q),
    )
    return column_statistics(call, _NEEDS)


def _check_tensors(q: Tensor, k: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 4 or not tensor.numel() or not tensor.is_floating_point():
            found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(
                f"`{name}` is {found}; expected a floating-point tensor (batch, heads, length, width), each at least 1"
            )
    for what in ("device", "dtype"):
        if getattr(q, what) != getattr(k, what):
            raise InputError(f"`q` has {what} {getattr(q, what)} and `k` {getattr(k, what)}; use k.to({what}=q.{what})")
    for name, tensor in (("q", q), ("k", k)):
        if bad := int((~torch.isfinite(tensor)).sum()):
            raise InputError(f"`{name}` has NaN or infinities in {bad} of {tensor.numel()} numbers; expected finite ones")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise InputError(
            f"`q` has shape {tuple(q.shape)} and `k` {tuple(k.shape)}, read as (batch, heads, length, width): batch and width "
            "must be the same, and the heads of `q` as many as those of `k` or a multiple, as grouped queries have"
        )


def _rule(q: Tensor, k: Tensor, causal: bool, window: int | None, mask: Tensor | None) -> Visibility:
    offset, device = k.shape[2] - q.shape[2], q.device
    rule: Visibility = Causal(offset, device) if causal else Everything(device)
    if window is not None:
        if not math.isfinite(window) or int(window) != window:
            raise ConfigurationError(f"`window` is {window}; expected a whole number of keys")
        if window < 1 or not causal:
            raise ConfigurationError(
                f"`window` is {window} with causal={causal}; expected 1 or more keys and causal=True: say with `mask` what "
                "else is hidden"
            )
        rule &= Window(int(window), offset, device)
    if mask is None:
        return rule
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    dense = [(b, h, q_len, kv_len) for b in (1, batch) for h in (1, heads)]
    mask = _boolean("mask", mask, q, [(batch, kv_len), *dense])
    hidden: Visibility = Keys(mask) if mask.ndim == 2 else Dense(mask)
    return hidden if isinstance(rule, Everything) else rule & hidden


def _boolean(name: str, mask: Tensor, q: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) not in shapes or mask.device != q.device:
        found = f"{mask.dtype} {tuple(mask.shape)} on {mask.device}" if isinstance(mask, Tensor) else type(mask).__name__
        wanted = " or ".join(str(shape) for shape in dict.fromkeys((shapes[0], shapes[-1])))
        raise InputError(f"`{name}` is {found}; expected torch.bool, true where visible, of shape {wanted} on {q.device}")
    return mask


def _sink_scores(sink_logits: Tensor, q: Tensor) -> Tensor:
    if not isinstance(sink_logits, Tensor) or sink_logits.shape != (q.shape[1],) or not bool(torch.isfinite(sink_logits).all()):
        found = f"shape {tuple(sink_logits.shape)}" if isinstance(sink_logits, Tensor) else f"type {type(sink_logits).__name__}"
        raise InputError(f"`sink_logits` has {found}; expected a tensor of one finite score for each of the {q.shape[1]} heads")
    return sink_logits.detach().to(q.device, torch.promote_types(q.dtype, torch.float32))[None, :, None]
