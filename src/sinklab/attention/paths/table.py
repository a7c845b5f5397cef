"""Paths: the ways to compute an operation's head outputs, and which of them serves a call."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor, nn

from sinklab.attention.operation import Inputs, Operation
from sinklab.attention.paths import blocks, decode, flash, flex, linear
from sinklab.errors import ConfigurationError

PATHS: dict[str, str] = {
    "plain": "the reference: every weight is materialised",
    "decode": "one query against a cache, in two products over groups of heads; nothing is repeated",
    "flash": "the stock flash kernel (from Hopper on cuDNN's), forward and backward, with the null term folded in afterwards; "
    "softmax operations",
    "blocks": "a block of rows at a time, recomputed in the backward pass; any operation whose rows are independent",
    "linear": "chunks of keys summed up as head_dim × head_dim states; feature kernels, causal",
    "flex": "FlexAttention with the similarity as a score modification; CUDA",
}
"""Name to what it is. ``auto`` takes the fastest that serves the call; a name is used or refused, never replaced."""


class Path(Protocol):
    """What the module of a path provides."""

    def obstacle(self, operation: Operation, inputs: Inputs) -> str | None:
        """Why this path cannot serve the call, or ``None``; reads shapes, dtypes and devices, never numbers."""

    def worthwhile(self, operation: Operation, inputs: Inputs) -> bool:
        """Whether it is faster than the plain path for a call that it can serve."""

    def head_outputs(self, operation: Operation, inputs: Inputs) -> Tensor:
        """Head outputs ``(batch, num_heads, q_len, value_dim)``, differentiable, equal to the plain reference."""


_MODULES: dict[str, Path] = {"decode": decode, "flash": flash, "linear": linear, "blocks": blocks, "flex": flex}
"""In the order in which ``auto`` asks them."""


def obstacle(path: str, operation: Operation, inputs: Inputs) -> str | None:
    """Why ``path`` cannot serve the call, or ``None``."""
    return None if path == "plain" else _MODULES[path].obstacle(operation, inputs)


def choose(operation: Operation, inputs: Inputs) -> str:
    """The path that ``auto`` takes: the first fast one that can serve the call and is worth it, else ``plain``."""
    for path, module in _MODULES.items():
        if module.obstacle(operation, inputs) is None and module.worthwhile(operation, inputs):
            return path
    return "plain"


def compute(
    operation: Operation, inputs: Inputs, path: str = "auto", *, need_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Head outputs ``(batch, num_heads, q_len, value_dim)`` and, on the plain path, weights on real keys.

    ``path`` is ``auto`` or a key of :data:`PATHS`; one that cannot serve the call, or has not the weights that are needed, is a
    :class:`ConfigurationError`.
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
        reason = _MODULES[path].obstacle(operation, inputs)
        if reason is None and need_weights:
            reason = "attention weights were asked for, which it never forms"
        if reason:
            raise ConfigurationError(
                f"attention path {path!r} cannot serve operation {operation.name!r}: {reason}; use 'auto' or 'plain'"
            )
    if path != "plain":
        return _MODULES[path].head_outputs(operation, inputs), None
    return operation.head_outputs(
        inputs.queries, inputs.keys, inputs.values, inputs.mask(), inputs.scaling, inputs.state, softcap=inputs.softcap,
        bias=inputs.bias, dropout=inputs.dropout,
    )  # fmt: skip


def set_attention_path(model: nn.Module, path: str) -> None:
    """Let every attention module of ``model`` that runs a registered operation use ``path``.

    Raises:
        ConfigurationError: an unknown path. One that cannot serve a call raises when that call is made.
    """
    if path != "auto" and path not in PATHS:
        raise ConfigurationError(f"there is no attention path {path!r}; known: auto, {', '.join(PATHS)}")
    for module in model.modules():
        module.attention_path = path  # type: ignore[assignment]
