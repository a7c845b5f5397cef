"""Folded heads: one layer of the trigger model with two products of maps in the place of four maps, for speed.

Heads of the full width without positions need no queries, keys and values of their own. A score is ``x_iᵀ (W_Qᵀ W_K) x_k`` and
an output ``Σ_k weight_k (W_O W_V) x_k``, so that the tokens themselves are keys and values of all heads, and a sequence has
``length · heads`` queries: two matrix products forward where heads need five, over fewer and larger matrices. The gradient is
written out, as autograd would spend as long between the products as in them.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinklab.attention.operation import Operation
from sinklab.attention.paths.row_blocks import kernel_key
from sinklab.attention.paths.row_kernel import RowKernel, Rows
from sinklab.errors import ConfigurationError
from sinklab.operations.softmax import Softmax

__all__ = ["folded_heads", "kernel_of"]

PARTS = ("prepare", "features", "null_scores", "null_value", "output_bias", "gain", "finish", "head_outputs")
"""What an operation must leave alone to be served: they act on queries, keys, head outputs, or the maps themselves."""


def kernel_of(operation: Operation) -> RowKernel | None:
    """The row kernel with which :func:`folded_heads` serves an operation, or ``None``: it must be a matter of weights alone."""
    cls = type(operation)
    plain = all(getattr(cls, part) is getattr(Operation, part) for part in PARTS) and not operation.needs_layer_input
    if not plain or kernel_key(operation) is None:
        return None
    return _ShortSoftmax() if cls.weights is Softmax.weights else operation.row_kernel()


def folded_heads(
    tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, heads: int, kernel: RowKernel
) -> Tensor:
    """Causal attention, summed over heads; float32 or float64. First derivatives only, in all tensors, once.

    Args:
        tokens: ``(batch, length, width)``.
        query, key, value: maps of all heads as an ``nn.Linear`` has them, ``(heads · width, width)``.
        output: the map back, ``(width, heads · width)``.
        heads: how many.
        kernel: of the operation.

    Returns:
        ``(batch, length, width)``.

    Raises:
        ConfigurationError: in a second backward (``retain_graph``): the gradient is worked out in the buffers of the forward.
    """
    return _Folded.apply(tokens.contiguous(), query, key, value, output, heads, kernel)


class _ShortSoftmax(RowKernel):
    """Softmax of rows of a few keys, for which one pass of torch's own beats the several passes of the kernel for long rows."""

    hidden: ClassVar[float] = float("-inf")

    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        return torch.softmax(scores, dim=1, out=scratch)

    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        torch._softmax_backward_data(gradient, scratch, 1, scratch.dtype, grad_input=gradient)


@functools.lru_cache(maxsize=16)
def _causal(
    batch: int, length: int, heads: int, low: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """``low`` where a key is hidden, else 0, and 1 where it is visible, ``(length · heads, length)``; how many are, by row."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril().repeat_interleave(heads, 0)
    counts = visible.sum(dim=1, keepdim=True).repeat(batch, 1)
    return (
        torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, low),
        visible.to(dtype),
        counts.to(dtype),
    )


class _Folded(torch.autograd.Function):
    """Rows are those of one query and head, in the order (sequence, query, head)."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, heads: int, kernel: RowKernel
    ) -> Tensor:
        batch, length, width = tokens.shape
        query, key, value = (whole.view(heads, width, width) for whole in (query, key, value))
        output = output.view(width, heads, width)
        # Side by side for a product with all tokens: x · scoring are the queries of all heads.
        scoring = (query.mT @ key).transpose(0, 1).reshape(width, heads * width)
        answering = (value.mT @ output.permute(1, 2, 0)).view(heads * width, width)
        low, visible, counts = _causal(batch, length, heads, kernel.hidden, tokens.dtype, tokens.device)
        flat, rows = tokens.view(-1, width), Rows(counts=counts)
        queries = (flat @ scoring).view(batch, length * heads, width)
        # What is so low swallows the score that it is added to; only 0 does not.
        scores = torch.baddbmm(low, queries, tokens.mT, alpha=kernel.unit)
        if kernel.hidden == 0:
            scores.mul_(visible)
        scratch = torch.empty_like(scores)
        weights = kernel.weigh(scores.flatten(0, 1), scratch.flatten(0, 1), rows).view(scores.shape)
        averages = torch.bmm(weights, tokens)
        if rows.factor is not None:
            averages.view(-1, width).mul_(rows.factor)
        averages = averages.view(batch * length, heads * width)
        ctx.save_for_backward(tokens, query, key, value, output, scoring, answering, queries, averages)
        ctx.weighed = kernel, scores, scratch, weights, rows
        return (averages @ answering).view(tokens.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, query, key, value, output, scoring, answering, queries, averages = ctx.saved_tensors
        if ctx.weighed is None:
            raise ConfigurationError("folded heads: a second backward through one forward; the first has used up its buffers")
        (kernel, scores, scratch, weights, rows), ctx.weighed = ctx.weighed, None
        flat, upstream = tokens.view(-1, tokens.shape[2]), gradient.reshape(-1, tokens.shape[2])
        of_answering = (averages.T @ upstream).view(value.shape)
        of_averages = (upstream @ answering.T).view(queries.shape)
        if rows.factor is not None:
            of_averages.view(-1, tokens.shape[2]).mul_(rows.factor)
        of_scores = torch.bmm(of_averages, tokens.mT)
        of_tokens = torch.bmm(weights.mT, of_averages) if ctx.needs_input_grad[0] else None
        if kernel.needs_term:
            rows.term = torch.mul(weights, of_scores, out=scratch).flatten(0, 1).sum(dim=1, keepdim=True)
            if rows.factor is not None:
                rows.term *= rows.factor
        kernel.differentiate(scores.flatten(0, 1), of_scores.flatten(0, 1), scratch.flatten(0, 1), rows)
        of_queries = torch.bmm(of_scores, tokens).view(len(flat), -1)
        if of_tokens is not None:
            of_tokens.baddbmm_(of_scores.mT, queries)
            of_tokens.view(flat.shape).addmm_(of_queries, scoring.T)
        of_scoring = (flat.T @ of_queries).view(output.shape).transpose(0, 1)
        return (
            of_tokens,
            (key @ of_scoring.mT).flatten(0, 1),
            (query @ of_scoring).flatten(0, 1),
            (output.permute(1, 2, 0) @ of_answering.mT).flatten(0, 1),
            (of_answering.mT @ value.mT).transpose(0, 1).flatten(1),
            None,
            None,
        )
