"""Row kernels: whole rows of scores into weights, and gradients back into scores, on buffers that stay in the cache."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

from torch import Tensor

LOG2E = 1.4426950408889634
"""Unit of kernels that work with powers of two: ``exp2`` is several times as fast as ``exp`` where MKL serves the latter."""
LOWEST = -1e30
"""A score whose exponential is exactly 0, and which, being finite, does not produce NaN."""


@dataclasses.dataclass(eq=False)
class Rows:
    """A block of whole rows, beside their scores; every tensor is ``(rows, 1)`` and has the dtype of the scores.

    Attributes:
        counts: how many keys each query sees, as a number of that dtype.
        blank: boolean: rows that see no key; ``None`` if there are none.
        null_scores: in natural units, or ``None``.
        factor: set by :meth:`RowKernel.weigh`: what its result is multiplied by to give weights; ``None`` for 1.
        null_mass: set by :meth:`RowKernel.weigh` when there are null scores.
        kept: what :meth:`RowKernel.weigh` leaves for :meth:`RowKernel.differentiate`, if anything.
        term: ``factor`` times the sum, over all keys and the null, of weight times gradient; set before
            :meth:`RowKernel.differentiate` if the kernel ``needs_term``.
    """

    counts: Tensor
    blank: Tensor | None = None
    null_scores: Tensor | None = None
    factor: Tensor | None = None
    null_mass: Tensor | None = None
    kept: Any = None
    term: Tensor = dataclasses.field(init=False)

    def divide_by(self, total: Tensor) -> Tensor:
        """Let ``factor`` be one over ``total``, and give it; 0 for a row that sees no key or whose total is 0."""
        self.factor = factor = total.reciprocal().nan_to_num_(nan=float("nan"), posinf=0.0)
        return factor if self.blank is None else factor.masked_fill_(self.blank, 0.0)


class RowKernel(abc.ABC):
    """Weights and score gradients of rows, in place; what the blocks path asks of an operation.

    ``weights = factor · weigh(scores)``. In the backward the rows are weighed again and then differentiated, so nothing but
    queries, keys, values and outputs is kept. Scores are float32 or float64.

    Attributes:
        unit: what natural scores have been multiplied by when the kernel receives them.
        hidden: what it finds in the place of the score of a hidden key; its weight and gradient must come out as exactly 0.
        takes_null: null scores are served; the weights are then a softmax, in which the null is one more term.
        needs_term: ``rows.term`` is read, as it must be where ``factor`` is one over a sum of the row: through that sum every
            score of the row has a gradient.
    """

    unit: ClassVar[float] = 1.0
    hidden: ClassVar[float] = LOWEST
    takes_null: ClassVar[bool] = False
    needs_term: bool = False

    @abc.abstractmethod
    def weigh(self, scores: Tensor, scratch: Tensor, rows: Rows) -> Tensor:
        """Weights divided by ``rows.factor``, written into ``scores`` or ``scratch``; both are ``(rows, keys)`` buffers."""

    @abc.abstractmethod
    def differentiate(self, scores: Tensor, gradient: Tensor, scratch: Tensor, rows: Rows) -> None:
        """Turn ``gradient`` in place into the gradient with respect to natural scores.

        Args:
            scores, scratch: as :meth:`weigh` left them, but for ``scratch`` if the kernel ``needs_term``; may be overwritten.
            gradient: of the loss with respect to what :meth:`weigh` returned, ``rows.factor`` held fixed.
        """


def visible_count(scores: Tensor, visible: Tensor | None) -> Tensor:
    """How many keys each query sees, in the dtype of ``scores``, broadcastable to ``(…, q_len, 1)``; at least 1.

    It is a property of the query, not of the tensor: the same whether the row is computed alone, in a block or from a cache.
    """
    if visible is None:
        return scores.new_full((1, 1), max(1, scores.shape[-1]))
    return visible.expand(*visible.shape[:-1], scores.shape[-1]).sum(dim=-1, keepdim=True).clamp(min=1).to(scores.dtype)
