"""Row blocks: attention and its gradients by a row kernel, some rows of one head at a time; one node of a compiled graph."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.attention.paths.row_kernel import RowKernel, Rows
from sinklab.errors import ConfigurationError
from sinklab.registry import operations

_ROWS = 256
"""Rows of a block, over the heads of a group. Fewer make slower products, more waste arithmetic above the diagonal."""
_SHORT, _FEW = 1024, 128
"""Up to this many keys half of the rows suffice: with several heads at a time the products are large enough all the same."""
_SCORES = 2**20
"""Scores of a block beyond which it has fewer rows, so that a long sequence does not leave the cache. Up to half of them, heads
are taken together, so that a short sequence does not spend its time between the products."""


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Some rows, the keys that one of them sees, and among these the range in which some rows do not see some keys."""

    rows: slice
    keys: slice  # at least one, so that there is a row to weigh
    edge: slice | None  # counted from ``keys.start``: outside of it every row sees every key
    hidden: Tensor | None  # boolean (rows, edge); None if the edge is the causal triangle
    counts: Tensor  # visible keys of every row, over and over for all heads that are taken together: (heads · rows, 1)
    blank: Tensor | None  # boolean, likewise: rows that see no key; None if there are none


@dataclasses.dataclass(frozen=True, eq=False)
class HeadSlices:
    """Query heads that are worked on together, and their key-value heads."""

    heads: slice
    kv_heads: slice

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads.stop - self.kv_heads.start


class RowPlan:
    """The parts of every sample; blocks are planned once for each mask that differs. ``dtype`` is that of the scores."""

    def __init__(self, queries: Tensor, keys: Tensor, visible: Tensor | None, causal: bool, dtype: torch.dtype) -> None:
        self.visible, self.causal, self.dtype, self.device = visible, causal, dtype, queries.device
        self.q_len, self.kv_len = queries.shape[2], keys.shape[2]
        self.num_heads, self.num_kv_heads = queries.shape[1], keys.shape[1]
        self.by_head = visible is not None and visible.shape[1] > 1
        groups = 1 if self.by_head else self.num_heads // self.num_kv_heads
        rows = min(_ROWS if self.kv_len > _SHORT else _FEW, _SCORES // self.kv_len) // groups
        self.rows = min(max(16, rows), self.q_len)
        size = self.rows * groups * self.kv_len
        self.together = 1 if self.by_head else min(self.num_kv_heads, max(1, 2**19 // size))
        self.heads = self.together * groups
        self.place: tuple[int, int] | None = None
        self.blocks: list[Block] = []

    def parts(self, sample: int) -> Iterator[tuple[HeadSlices, Block]]:
        """All heads and rows of a sample."""
        groups = self.num_heads // self.num_kv_heads
        if self.by_head:
            parts = [HeadSlices(slice(h, h + 1), slice(h // groups, h // groups + 1)) for h in range(self.num_heads)]
        else:
            starts = range(0, self.num_kv_heads, self.together)
            shared = [slice(start, min(start + self.together, self.num_kv_heads)) for start in starts]
            parts = [HeadSlices(slice(kv.start * groups, kv.stop * groups), kv) for kv in shared]
        for part in parts:
            for block in self._blocks(sample, part.heads.start):
                yield part, block

    def _blocks(self, sample: int, head: int) -> list[Block]:
        batch, heads = (1, 1) if self.visible is None else self.visible.shape[:2]
        cell = (sample % batch, head % heads)
        if cell != self.place:
            mask = None if self.visible is None else self.visible[cell].expand(self.q_len, self.kv_len)
            starts = range(0, self.q_len, self.rows)
            rows = [slice(start, min(start + self.rows, self.q_len)) for start in starts]
            self.place, self.blocks = cell, [self._causal(part) if mask is None else self._masked(part, mask) for part in rows]
        return self.blocks

    def _causal(self, rows: slice) -> Block:
        if not self.causal:
            counts = torch.full((rows.stop - rows.start, 1), float(self.kv_len), dtype=self.dtype, device=self.device)
            return Block(rows, slice(0, self.kv_len), None, None, counts.repeat(self.heads, 1), None)
        counts = torch.arange(rows.start + 1, rows.stop + 1, dtype=self.dtype, device=self.device)
        stop = min(rows.stop, self.kv_len)
        edge = slice(rows.start, stop) if rows.start < stop else None
        return Block(rows, slice(0, stop), edge, None, counts.clamp_(max=self.kv_len)[:, None].repeat(self.heads, 1), None)

    def _masked(self, rows: slice, mask: Tensor) -> Block:
        seen = mask[rows]
        needed = seen.any(dim=0).nonzero()
        keys = slice(int(needed[0]), int(needed[-1]) + 1) if len(needed) else slice(0, 1)
        seen = seen[:, keys]
        partly = (~seen.all(dim=0)).nonzero()
        edge = slice(int(partly[0]), int(partly[-1]) + 1) if len(partly) else None
        hidden = None if edge is None else ~seen[:, edge]
        counts = seen.sum(dim=1, keepdim=True).repeat(self.heads, 1)
        blank = counts == 0
        return Block(rows, keys, edge, hidden, counts.to(self.dtype), blank if bool(blank.any()) else None)


# --- which operation a node of the graph is for ------------------------------------------------------------------------------

_operations: dict[str, Operation] = {}


@torch.compiler.assume_constant_result
def kernel_key(operation: Operation) -> str | None:
    """A name for the class and settings of an operation whose row kernel serves it, or ``None`` if none does.

    A node of a graph takes strings and numbers, and the graph may be kept on disk for another process, so it is a name.
    """
    kernel = operation.row_kernel()
    nulls, mass = (_definer(operation, name) is not Operation for name in ("null_scores", "null_value"))
    if kernel is None or (nulls and not kernel.takes_null) or (mass and not nulls):
        return None
    # A subclass with weights of its own has not got the kernel that it inherits.
    owner = _definer(operation, "row_kernel")
    if not all(issubclass(owner, _definer(operation, name)) for name in ("weights", "null_mass")):
        return None
    key = f"{type(operation).__module__}.{type(operation).__qualname__} {json.dumps(operation.to_dict())}"
    _operations[key] = operation
    return key


def _definer(operation: Operation, name: str) -> type:
    return next(cls for cls in type(operation).__mro__ if name in vars(cls))


def _kernel(key: str) -> RowKernel:
    if key not in _operations:  # a graph that another process captured
        _operations[key] = operations.make(json.loads(key.split(" ", 1)[1]))
    kernel = _operations[key].row_kernel()
    assert kernel is not None
    return kernel


# --- the work on one block ---------------------------------------------------------------------------------------------------


class _Room(threading.local):
    """Memory of the buffers, kept from call to call: to ask the system for it anew would cost as much as a short call."""

    def __init__(self) -> None:
        self.flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, device: torch.device, size: int) -> Tensor:
        key = (name, dtype, device)
        if key not in self.flat or self.flat[key].numel() < size:
            with torch.inference_mode(False):  # a tensor made in that mode could not be written outside of it
                self.flat[key] = torch.empty(size, dtype=dtype, device=device)
        return self.flat[key][:size]


_room = _Room()


class _Work:
    """Buffers for one block, and the steps that forward and backward share."""

    def __init__(self, kernel: RowKernel, plan: RowPlan, queries: Tensor, scaling: float) -> None:
        self.kernel, self.plan, self.scaling = kernel, plan, scaling
        self.narrow, self.wide = queries.dtype, plan.dtype
        self.device = queries.device
        self.views: dict[tuple[object, ...], Tensor] = {}
        triangle = torch.ones(plan.rows, plan.rows, dtype=self.wide, device=self.device).triu_(1)
        self.triangle = triangle.mul_(kernel.hidden) if plan.causal else triangle

    def buffer(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Room for a tensor, which holds what was last written under the name, or anything."""
        key = (name, dtype, *shape)
        if key not in self.views:
            self.views[key] = _room.take(name, dtype, self.device, math.prod(shape)).view(shape)
        return self.views[key]

    def packed(self, name: str, tensor: Tensor) -> Tensor:
        """A copy without gaps, which products are much faster with."""
        return self.buffer(name, self.narrow, *tensor.shape).copy_(tensor)

    def product(self, name: str, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
        """``alpha · left · right``, rounded to the dtype of the factors."""
        out = self.buffer(name, self.narrow, left.shape[0], left.shape[1], right.shape[2])
        return torch.baddbmm(out, left, right, beta=0, alpha=alpha, out=out)

    def accumulate(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add ``left · right``, of the dtype of the inputs, to a wide ``total``."""
        if self.wide == self.narrow:
            total.baddbmm_(left, right)
        else:
            total.add_(self.product("term", left, right))

    def widened(self, name: str, narrow: Tensor) -> Tensor:
        return narrow if self.wide == self.narrow else self.buffer(name, self.wide, *narrow.shape).copy_(narrow)

    def narrowed(self, name: str, wide: Tensor) -> Tensor:
        return wide if self.wide == self.narrow else self.buffer(name, self.narrow, *wide.shape).copy_(wide)

    def rows_of(self, name: str, tensor: Tensor, part: HeadSlices, block: Block) -> Tensor:
        """The rows of a block, out of ``(num_heads, q_len, …)``."""
        return self.packed(name, tensor[part.heads, block.rows]).view(part.num_kv_heads, -1, tensor.shape[2])

    def blocks(
        self, sample: int, queries: Tensor, keys: Tensor, values: Tensor, null_scores: Tensor | None
    ) -> Iterator[tuple[HeadSlices, Block, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Rows]]]:
        """Every block of a sample: its place, its queries, keys and values, and what :meth:`weigh` gives for it."""
        null_scores = None if null_scores is None else null_scores[sample]
        for part, block in self.plan.parts(sample):
            query = self.rows_of("query", queries[sample], part, block)
            key = self.packed("key", keys[sample, part.kv_heads, block.keys])
            value = self.packed("value", values[sample, part.kv_heads, block.keys])
            yield part, block, query, key, value, self.weigh(query, key, null_scores, part, block)

    def weigh(
        self, queries: Tensor, keys: Tensor, null_scores: Tensor | None, part: HeadSlices, block: Block
    ) -> tuple[Tensor, Tensor, Tensor, Rows]:
        """Scores and scratch as the kernel left them, weights divided by their factor, and the rows."""
        kernel = self.kernel
        scores = self.widened("scores", self.product("scores", queries, keys.mT, self.scaling * kernel.unit))
        heads, rows = part.heads.stop - part.heads.start, block.rows.stop - block.rows.start
        if block.edge is not None:
            edge = scores.view(heads, rows, -1)[:, :, block.edge]
            if block.hidden is not None:
                edge.masked_fill_(block.hidden, kernel.hidden)
            elif kernel.hidden == 0:
                edge.tril_()
            else:  # several times as fast as filling
                edge.add_(self.triangle[:rows, : edge.shape[2]])
        scratch = self.buffer("scratch", self.wide, *scores.shape)
        rows_of_block = Rows(
            counts=block.counts[: heads * rows],
            blank=None if block.blank is None else block.blank[: heads * rows],
            null_scores=None if null_scores is None else null_scores[part.heads, block.rows].to(self.wide).reshape(-1, 1),
        )
        weights = kernel.weigh(scores.flatten(0, 1), scratch.flatten(0, 1), rows_of_block)
        return scores, scratch, weights.view(scores.shape), rows_of_block


# --- forward -----------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("sinklab::row_attention", mutates_args=())
def row_attention(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, null_scores: Tensor | None, causal: bool,
    scaling: float, operation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights times values, and the null mass; differentiable in queries, keys, values and null scores, once.

    Arguments are those of :class:`~sinklab.attention.operation.Inputs`, of one dtype; null scores ``(batch, num_heads, q_len)``
    or ``None``; ``operation`` is what :func:`kernel_key` made of one.

    Returns:
        ``(batch, num_heads, q_len, value_dim)`` in the dtype of the queries, and float32 (or float64)
        ``(batch, num_heads, q_len)``, empty without null scores. Extra memory is O(kv_len) for each row of one block.
    """
    outputs, null_mass = _empty(queries, values, null_scores)
    plan = RowPlan(queries, keys, visible, causal, torch.promote_types(queries.dtype, torch.float32))
    work = _Work(_kernel(operation), plan, queries, scaling)
    for sample in range(queries.shape[0]):
        for part, block, _, _, value, (_, _, weights, rows) in work.blocks(sample, queries, keys, values, null_scores):
            result = work.product("result", work.narrowed("weights", weights), value)
            target = outputs[sample, part.heads, block.rows]
            if rows.factor is None:
                target.copy_(result.view(target.shape))
            else:
                torch.mul(result.view(target.shape), rows.factor.view(*target.shape[:2], 1), out=target)
            if rows.null_mass is not None:
                null_mass[sample, part.heads, block.rows] = rows.null_mass.view(target.shape[:2])
    return outputs, null_mass


def _empty(queries: Tensor, values: Tensor, null_scores: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for the results; heads are the innermost but one in memory, as the output projection wants them."""
    batch, num_heads, q_len, _ = queries.shape
    outputs = queries.new_empty(batch, q_len, num_heads, values.shape[3]).transpose(1, 2)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    return outputs, queries.new_empty((0,) if null_scores is None else (batch, num_heads, q_len), dtype=dtype)


@row_attention.register_fake
def _(queries, keys, values, visible, null_scores, causal, scaling, operation):  # type: ignore[no-untyped-def]
    return _empty(queries, values, null_scores)


# --- backward ----------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("sinklab::row_attention_backward", mutates_args=())
def _row_attention_backward(
    output_gradient: Tensor, null_gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None,
    null_scores: Tensor | None, causal: bool, scaling: float, operation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients with respect to queries, keys, values and null scores (empty without them)."""
    gradients = _empty_gradients(queries, keys, values, null_scores)
    query_gradient, key_gradient, value_gradient, null_score_gradient = gradients
    plan = RowPlan(queries, keys, visible, causal, torch.promote_types(queries.dtype, torch.float32))
    work = _Work(_kernel(operation), plan, queries, scaling)
    kernel = work.kernel
    for sample in range(queries.shape[0]):
        key_sum, value_sum = (torch.zeros(tensor.shape[1:], dtype=work.wide, device=work.device) for tensor in (keys, values))
        for part, block, query, key, value, weighed in work.blocks(sample, queries, keys, values, null_scores):
            scores, scratch, weights, rows = weighed
            upstream = work.rows_of("upstream", output_gradient[sample], part, block)
            if rows.factor is not None:
                upstream.copy_(upstream * rows.factor.view(*upstream.shape[:2], 1))
            work.accumulate(value_sum[part.kv_heads, block.keys], work.narrowed("weights", weights).mT, upstream)
            gradient = work.widened("gradient", work.product("gradient", upstream, value.mT))
            if kernel.needs_term:
                # Not <output, its gradient>: that is the same but for roundings, and those of the gradient must cancel.
                rows.term = torch.mul(weights, gradient, out=scratch).sum(dim=2).view(-1, 1)
                if rows.null_mass is not None:
                    # The null is one more term of the softmax, and its mass has the gradient of the null mass.
                    target = null_score_gradient[sample, part.heads, block.rows]
                    null_upstream = null_gradient[sample, part.heads, block.rows].reshape(-1, 1)
                    rows.term += rows.null_mass * null_upstream
                    target.copy_((rows.null_mass * (null_upstream - rows.term)).view(target.shape))
                if rows.factor is not None:
                    rows.term *= rows.factor
            kernel.differentiate(scores.flatten(0, 1), gradient.flatten(0, 1), scratch.flatten(0, 1), rows)
            gradient = work.narrowed("gradient", gradient)
            target = query_gradient[sample, part.heads, block.rows]
            target.copy_(work.product("result", gradient, key, scaling).view(target.shape))
            work.accumulate(key_sum[part.kv_heads, block.keys], gradient.mT, query)
        key_gradient[sample], value_gradient[sample] = key_sum.mul_(scaling), value_sum
    return gradients


def _empty_gradients(
    queries: Tensor, keys: Tensor, values: Tensor, null_scores: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nulls = queries.new_empty(0) if null_scores is None else null_scores.new_empty(null_scores.shape)
    return torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values), nulls


@_row_attention_backward.register_fake
def _(output_gradient, null_gradient, queries, keys, values, visible, null_scores, *rest):  # type: ignore[no-untyped-def]
    return _empty_gradients(queries, keys, values, null_scores)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, keys, values, visible, null_scores, ctx.causal, ctx.scaling, ctx.operation = inputs
    ctx.save_for_backward(queries, keys, values, visible, null_scores)


def _backward(context: Any, output_gradient: Tensor, null_gradient: Tensor) -> tuple[Tensor | None, ...]:
    queries, keys, values, visible, null_scores = context.saved_tensors
    gradients = _row_attention_backward(
        output_gradient, null_gradient, queries, keys, values, visible, null_scores, context.causal, context.scaling,
        context.operation,
    )  # fmt: skip
    return *gradients[:3], None, None if null_scores is None else gradients[3], None, None, None


def _no_second_derivative(context: object, *gradients: Tensor) -> None:
    raise ConfigurationError(
        "attention path 'blocks' has first derivatives only, and a second one was asked for (create_graph=True); use "
        "sinklab.attention.paths.table.set_attention_path(model, 'plain')"
    )


row_attention.register_autograd(_backward, setup_context=_keep)
_row_attention_backward.register_autograd(_no_second_derivative)
