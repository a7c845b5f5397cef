"""Eviction: a chunk of tokens in caches of scores; products are taken for all of it at once, who leaves is decided in order.

Whether a token leaves depends on the weights of all queries before, and those depend on who has left. But who has left only
hides scores; it changes none. So the scores of a chunk are one product, and what is done token after token is small: the least
score, one softmax over what is held, one sum.

With in-cache positions scores do change: a key comes one step closer to the queries when a token between them leaves. In ``n``
tokens that can happen ``n`` times, so there are as many scores for a query and a key, of the query rotated by as many
different steps, and the number of tokens that have left between the two says which is right. A few tokens at a time, since
products grow with the square of their number.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from sinklab.attention.operation import Operation, State
from sinklab.policies.base import ScoredPolicy
from sinklab.streaming.rotation_table import RotationTable

__all__ = ["AT_ONCE", "Attention", "Held", "dense", "evicting"]

AT_ONCE = 16
"""Tokens of a chunk whose scores are computed together under in-cache positions."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """How one call of an attention function makes head outputs of scores.

    Attributes:
        queries: ``(batch, num_kv_heads, groups, length, head_dim)``; ``groups`` query heads share a head of keys.
        null_scores: broadcast to ``(batch, num_kv_heads, groups, length)``; ``None`` without.
        operation, state, scaling, softcap: as in :class:`~sinklab.attention.call.AttentionCall`.
        dtype: of the head outputs.
    """

    queries: Tensor
    null_scores: Tensor | None
    operation: Operation
    state: State
    scaling: float
    softcap: float | None
    dtype: torch.dtype

    @property
    def takes_null_mass(self) -> bool:
        """Whether head outputs need the null mass."""
        return self.operation.null_value(self.state) is not None

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores ``(batch, num_kv_heads, groups, n, kv_len)``, float32 or wider, of ``n`` queries such as :attr:`queries`."""
        wide = torch.promote_types(queries.dtype, torch.float32)
        groups, length = queries.shape[2:4]
        mapped, keys = self.operation.features(queries.flatten(1, 2), keys, self.state)
        rows = (mapped.to(wide) * self.scaling).unflatten(1, (-1, groups)).flatten(2, 3)
        scores = torch.matmul(rows, keys.to(wide).transpose(2, 3)).unflatten(2, (groups, length))
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def null(self, query: int) -> Tensor | None:
        """Null scores of one query, ``(batch or 1, num_kv_heads, groups)``."""
        scores = self.null_scores
        return None if scores is None else scores[..., min(query, scores.shape[-1] - 1)]

    def weights(self, scores: Tensor, hidden: Tensor, null: Tensor | None) -> Tensor:
        """Signed weights of one query, ``(batch, num_kv_heads, groups, kv_len)``.

        Args:
            hidden: minus infinity at keys that are not held, 0 at others, ``(batch, num_kv_heads, 1, kv_len)``.
        """
        if self.operation.is_softmax and null is None:
            return torch.softmax(scores + hidden, dim=-1)
        return self.operation.weights(scores, hidden == 0, null)

    def outputs(self, weights: Tensor, values: Tensor) -> Tensor:
        """``(batch, num_heads, length, value_dim)`` of weights ``(batch, num_kv_heads, groups, length, kv_len)``."""
        return torch.matmul(weights.flatten(2, 3), values.to(weights.dtype)).unflatten(2, weights.shape[2:4]).flatten(1, 2)

    def finish(self, outputs: Tensor, null_mass: list[Tensor]) -> Tensor:
        """What the attention function gives, ``(batch, length, num_heads, value_dim)``.

        Args:
            null_mass: of every query, ``(batch, num_kv_heads, groups)``; empty where none is taken.
        """
        mass = torch.stack(null_mass, dim=3).flatten(1, 2) if null_mass else None
        finished = self.operation.finish(outputs.to(self.dtype), mass, self.state)
        return finished.transpose(1, 2).contiguous()


@dataclasses.dataclass
class Held:
    """Tokens of every head, oldest first.

    Attributes:
        keys, values: ``(batch, num_kv_heads, n, head_dim)``, keys as they were written.
        scores: float32 ``(batch, num_kv_heads, n)``.
        tokens: int64, likewise.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    tokens: Tensor

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.scores, self.tokens

    def part(self, start: int, stop: int) -> Held:
        """Some of the columns."""
        return Held(*(tensor[:, :, start:stop] for tensor in self._tensors))

    def and_then(self, newer: Held) -> Held:
        """These and newer ones."""
        return Held(*(torch.cat(pair, dim=2) for pair in zip(self._tensors, newer._tensors, strict=True)))

    def taken(self, columns: Tensor) -> Held:
        """Other columns of every head, int64 ``(batch, num_kv_heads, n)``."""

        rows, count = columns.shape[:2].numel(), self.tokens.shape[2]
        index = (columns.view(rows, -1) + count * torch.arange(rows, device=columns.device)[:, None]).flatten()
        # Whole rows of a matrix are copied much faster than numbers are gathered.
        return Held(*(tensor.flatten(0, 2)[index].unflatten(0, columns.shape) for tensor in self._tensors))


def dense(policy: ScoredPolicy, attention: Attention, held: Held, new: Held) -> tuple[Tensor, Held]:
    """Head outputs of a chunk for which there is room, and what is held behind it."""
    union, before = held.and_then(new), held.tokens.shape[2]
    length = new.tokens.shape[2]
    scores = attention.scores(attention.queries, union.keys)
    visible = torch.ones(length, before + length, dtype=torch.bool, device=scores.device).tril(before)
    null = attention.null_scores
    operation = attention.operation
    # Groups of query heads and queries are both rows of scores here.
    rows, shown = scores.flatten(2, 3), visible.repeat(scores.shape[2], 1)
    null = None if null is None else null.expand(scores.shape[:4]).flatten(2, 3)
    weights = operation.weights(rows, shown, null)
    mass = operation.null_mass(rows, shown, null) if attention.takes_null_mass else None
    weights = weights.unflatten(2, scores.shape[2:4])
    _add(policy, attention, union, weights)
    masses = [] if mass is None else list(mass.unflatten(2, scores.shape[2:4]).unbind(3))
    return attention.finish(attention.outputs(weights, union.values), masses), union


def evicting(
    policy: ScoredPolicy, attention: Attention, held: Held, new: Held, table: RotationTable | None
) -> tuple[Tensor, Held]:
    """Head outputs of a chunk where every slot is taken, and what is held behind it.

    Args:
        table: of the rotation of the keys where positions are in-cache; ``None`` where keys stay as they are.
    """
    length, slots = new.tokens.shape[2], held.tokens.shape[2]
    union = held.and_then(new)
    batch, heads, groups = attention.queries.shape[:3]
    growth = policy.growth(union.keys, union.values) if policy.needs_weights else None
    pinned = torch.isin(union.tokens, torch.tensor(policy.pinned, dtype=torch.long, device=union.tokens.device))
    sums = union.scores.masked_fill(pinned, torch.inf)  # of those that may leave
    hidden = sums.new_zeros(batch, heads, 1, slots + length)
    rows = _Rows(attention, union.keys) if table is None else _RankedRows(attention, union, hidden, policy, table)
    weights = torch.empty(batch, heads, groups, length, slots + length, dtype=rows.dtype, device=sums.device)
    weights[..., slots:] = 0.0
    masses: list[Tensor] = []
    for query in range(length):
        shown = slots + query + 1
        column = sums[..., : shown - policy.protected].argmin(dim=-1, keepdim=True)  # the first, so the oldest, of equals
        rows.prepare(query)
        sums.scatter_(2, column, torch.inf)
        hidden.scatter_(3, column[:, :, None], -torch.inf)
        rows.evict(column)
        scores, null = rows.row(query, shown), attention.null(query)
        own = attention.weights(scores, hidden[..., :shown], null)
        weights[:, :, :, query, :shown] = own
        if attention.takes_null_mass:
            mass = attention.operation.null_mass(scores, hidden[..., :shown] == 0, null)
            assert mass is not None
            masses.append(mass)
        if growth is not None:
            own = own.abs() if attention.operation.signed else own
            own = own[:, :, 0] if groups == 1 else own.sum(dim=2)
            sums[..., :shown] += own * growth[..., :shown] if isinstance(growth, Tensor) else own * growth
    outputs = attention.finish(attention.outputs(weights, union.values), masses)
    _add(policy, attention, union, weights)
    stays = (hidden[:, :, 0] == 0).nonzero()[:, 2].view(batch, heads, slots)  # as many of every head
    return outputs, union.taken(stays)


def _add(policy: ScoredPolicy, attention: Attention, union: Held, weights: Tensor) -> None:
    """Take in what was computed for all queries of a chunk."""
    growth = policy.growth(union.keys, union.values)
    if policy.needs_weights and growth is not None:
        attended = (weights.abs() if attention.operation.signed else weights).sum(dim=(2, 3), dtype=torch.float32)
        union.scores = union.scores + attended * growth


class _Rows:
    """Scores of the queries of a chunk against keys that stay where they are."""

    def __init__(self, attention: Attention, keys: Tensor) -> None:
        self.scores = attention.scores(attention.queries, keys)

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores."""
        return self.scores.dtype

    def prepare(self, query: int) -> None:
        """What comes before a token leaves for this query."""

    def evict(self, column: Tensor) -> None:
        """A token leaves, ``(batch, num_kv_heads, 1)``."""

    def row(self, query: int, shown: int) -> Tensor:
        """Scores against the first columns, ``(batch, num_kv_heads, groups, shown)``."""
        return self.scores[:, :, :, query, :shown]


class _RankedRows(_Rows):
    """The same where keys have the positions of their ranks: how many newer ones have left decides among several scores."""

    def __init__(self, attention: Attention, union: Held, hidden: Tensor, policy: ScoredPolicy, table: RotationTable) -> None:
        self.attention, self.hidden, self.policy, self.table = attention, hidden, policy, table
        self.keys, self.length = union.keys, attention.queries.shape[3]
        self.written = union.tokens.clamp(max=policy.num_slots - 1)
        self.columns = torch.arange(self.keys.shape[2], device=self.keys.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.table.cosines.dtype

    def prepare(self, query: int) -> None:
        if query % AT_ONCE:
            return
        attention, table = self.attention, self.table
        stop = min(query + AT_ONCE, self.length)
        shown = self.keys.shape[2] - self.length + stop
        near = max(0, shown - self.policy.protected)  # later keys have no newer one that may leave
        # Were nobody to leave, each key would be at its rank, and the queries one, two, ... behind the last position. A key was
        # written at the position of its token, or the last one, and all of these queries at the last.
        ranks = (self.hidden[:, :, 0, :shown] == 0).cumsum(dim=2) - 1
        keys = table.rotated(self.keys[:, :, :shown], ranks - self.written[:, :, :shown])
        which, lost, self.starts = _variants(stop - query)
        queries = attention.queries[:, :, :, query:stop]
        rotated = table.rotated(queries[:, :, :, which], (which + 1 - lost).to(keys.device))
        self.variants = attention.scores(rotated, keys[:, :, :near])
        plain = table.rotated(queries, self.columns[1 : 1 + stop - query])
        self.scores = attention.scores(plain, keys[:, :, near:])
        self.lost = self.columns.new_zeros(*keys.shape[:2], 1, 1, near)
        self.lost_each = self.lost.expand(-1, -1, queries.shape[2], -1, -1)

    def evict(self, column: Tensor) -> None:
        self.lost.add_((self.columns[: self.lost.shape[-1]] < column)[:, :, None, None])

    def row(self, query: int, shown: int) -> Tensor:
        query %= AT_ONCE
        variants = self.variants[:, :, :, self.starts[query] : self.starts[query + 1]]
        near = variants.gather(3, self.lost_each)[:, :, :, 0]
        return torch.cat((near, self.scores[:, :, :, query]), dim=-1)[..., :shown]


@functools.lru_cache(maxsize=AT_ONCE)
def _variants(length: int) -> tuple[Tensor, Tensor, list[int]]:
    """Every query with every number of tokens that can have left by then: query, number, and where each query starts."""
    with torch.inference_mode(False):
        which = torch.arange(length).repeat_interleave(torch.arange(length) + 2)
        lost = torch.cat([torch.arange(query + 2) for query in range(length)])
    return which, lost, [query * (query + 3) // 2 for query in range(length + 1)]
