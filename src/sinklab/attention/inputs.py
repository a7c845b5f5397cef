"""Inputs: one call of an operation as every path receives it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.attention.operation import EMPTY, State

__all__ = ["Inputs"]


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """One call as a path receives it.

    Attributes:
        queries: ``(batch, num_heads, q_len, head_dim)``; keys and values ``(batch, num_kv_heads, kv_len, …)``, not repeated.
        visible: boolean, broadcastable to ``(batch, num_heads, q_len, kv_len)``; ``None`` when ``causal`` says it all.
        causal: query ``i`` sees keys ``0 … i``; together with ``visible`` always False.
        scaling: factor on the scores.
        state: parameters of the operation.
        softcap, bias, dropout: the host model's own; see :meth:`Operation.head_outputs`.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor | None
    causal: bool
    scaling: float
    state: State = dataclasses.field(default_factory=lambda: EMPTY)
    softcap: float | None = None
    bias: Tensor | None = None
    dropout: float = 0.0

    @property
    def q_len(self) -> int:
        """Number of queries."""
        return self.queries.shape[2]

    @property
    def kv_len(self) -> int:
        """Number of keys."""
        return self.keys.shape[2]

    def mask(self) -> Tensor | None:
        """``visible``, or the causal rule as a boolean ``(q_len, kv_len)``; ``None`` when every key is visible."""
        if not self.causal:
            return self.visible
        return torch.ones(self.q_len, self.kv_len, dtype=torch.bool, device=self.queries.device).tril()

    def plain_scores(self) -> str | None:
        """Why a path that forms scores by itself cannot serve the call, or ``None``."""
        if self.softcap is not None:
            return "the model caps its scores"
        if self.bias is not None:
            return "the model adds a bias to its scores"
        return "attention dropout is on" if self.dropout else None
