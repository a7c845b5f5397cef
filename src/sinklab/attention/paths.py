"""Paths: the ways to compute an operation's head outputs, and which of them serves a call."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Protocol

import torch
from torch import Tensor, nn

from sinklab.attention.operation import EMPTY, Operation, State
from sinklab.errors import ConfigurationError

__all__ = ["PATHS", "Inputs", "Path", "choose", "compute", "obstacle", "set_attention_path"]

PATHS: dict[str, str] = {
    "plain": "the reference: every weight is materialised",
    "flash": "the stock flash kernel, forward and backward, with the null term folded in afterwards; softmax operations",
    "blocks": "a block of rows at a time, recomputed in the backward; any operation whose rows do not need each other",
    "linear": "chunks of keys summed up as head_dim × head_dim states; feature kernels, causal",
    "flex": "FlexAttention with the similarity as a score modification; CUDA",
}
"""Name to what it is. ``auto`` takes the fastest that serves the call; a name is used or refused, never replaced."""


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


class Path(Protocol):
    """What the module of a path provides."""

    def obstacle(self, operation: Operation, inputs: Inputs) -> str | None:
        """Why this path cannot serve the call, or ``None``; reads shapes, dtypes and devices, never numbers."""

    def worthwhile(self, operation: Operation, inputs: Inputs) -> bool:
        """Whether it is faster than the plain path for a call that it can serve."""

    def head_outputs(self, operation: Operation, inputs: Inputs) -> Tensor:
        """Head outputs ``(batch, num_heads, q_len, value_dim)``, differentiable, equal to the plain reference."""


_ORDER = ("flash", "linear", "blocks", "flex")
_MODULES = {
    "flash": "sinklab.attention.path_flash",
    "blocks": "sinklab.attention.path_blocks",
    "linear": "sinklab.attention.path_linear",
    "flex": "sinklab.attention.path_flex",
}


def _module(path: str) -> Path:
    return importlib.import_module(_MODULES[path])  # type: ignore[return-value]


def obstacle(path: str, operation: Operation, inputs: Inputs) -> str | None:
    """Why ``path`` cannot serve the call, or ``None``."""
    return None if path == "plain" else _module(path).obstacle(operation, inputs)


def choose(operation: Operation, inputs: Inputs) -> str:
    """The path that ``auto`` takes: the first fast one that can serve the call and is worth it, else ``plain``."""
    for path in _ORDER:
        module = _module(path)
        if module.obstacle(operation, inputs) is None and module.worthwhile(operation, inputs):
            return path
    return "plain"


def compute(
    operation: Operation, inputs: Inputs, path: str = "auto", *, need_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Head outputs ``(batch, num_heads, q_len, value_dim)`` and, on the plain path, weights on real keys.

    Args:
        path: ``auto`` or a key of :data:`PATHS`.
        need_weights: the caller wants the weights, which only the plain path has.

    Raises:
        ConfigurationError: an unknown path, one that cannot serve the call, or weights asked of one that has none.
    """
    device = inputs.queries.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        # Autocast reaches torch's own functions only; kernels called by name and custom backwards need equal dtypes.
        inputs = dataclasses.replace(
            inputs, queries=inputs.queries.to(dtype), keys=inputs.keys.to(dtype), values=inputs.values.to(dtype)
        )
    if path == "auto":
        path = "plain" if need_weights else choose(operation, inputs)
    elif path not in PATHS:
        raise ConfigurationError(f"there is no attention path {path!r}; known: auto, {', '.join(PATHS)}")
    elif path != "plain":
        reason = _module(path).obstacle(operation, inputs)
        if reason is None and need_weights:
            reason = "attention weights were asked for, which it never forms"
        if reason:
            raise ConfigurationError(
                f"attention path {path!r} cannot serve operation {operation.name!r}: {reason}; use 'auto' or 'plain'"
            )
    if path != "plain":
        return _module(path).head_outputs(operation, inputs), None
    return operation.head_outputs(
        inputs.queries,
        inputs.keys,
        inputs.values,
        inputs.mask(),
        inputs.scaling,
        inputs.state,
        softcap=inputs.softcap,
        bias=inputs.bias,
        dropout=inputs.dropout,
    )


def set_attention_path(model: nn.Module, path: str) -> None:
    """Let every attention module of ``model`` that runs a registered operation use ``path``.

    Raises:
        ConfigurationError: an unknown path. One that cannot serve a call raises when that call is made.
    """
    if path != "auto" and path not in PATHS:
        raise ConfigurationError(f"there is no attention path {path!r}; known: auto, {', '.join(PATHS)}")
    for module in model.modules():
        module.attention_path = path  # type: ignore[assignment]
