"""The linear path; see :data:`sinklab.attention.paths.PATHS`."""

from __future__ import annotations

from torch import Tensor

from sinklab.attention.inputs import Inputs
from sinklab.attention.operation import Operation

__all__ = ["head_outputs", "obstacle", "worthwhile"]


def obstacle(operation: Operation, inputs: Inputs) -> str | None:
    """Why this path cannot serve the call."""
    return "it is not built yet"


def worthwhile(operation: Operation, inputs: Inputs) -> bool:
    """Whether it beats the plain path."""
    return False


def head_outputs(operation: Operation, inputs: Inputs) -> Tensor:
    """Head outputs."""
    raise NotImplementedError
