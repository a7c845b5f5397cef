"""The trigger-conditional task of Ran-Milo 2026 (arXiv 2603.11487): be silent everywhere, except at one marked token.

coordinate            BOS   content token        trigger
0                     1     0                    0
1                     0     0                    1
2 … width - 2         0     Uniform(-1, 1)       Uniform(-1, 1)
width - 1             0     1                    0
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError

__all__ = ["BIAS", "BOS", "TRIGGER", "Target", "TriggerBatch", "trigger_batch"]

BOS, TRIGGER, BIAS = 0, 1, -1
"""Coordinates that mark the first token, the trigger, and content tokens."""

Target = Literal["including", "preceding"]
"""The mean at the trigger is over the tokens behind BOS up to the trigger, ``"including"`` it (the released generator) or only
``"preceding"`` it (the paper's words)."""


@dataclasses.dataclass(frozen=True)
class TriggerBatch:
    """Sequences with one trigger each.

    Attributes:
        inputs: ``(batch, length, width)``.
        targets: same shape: the mean at the trigger, 0 elsewhere. A model with residual connections is to give
            ``inputs + targets``.
        positions: int64 ``(batch,)``: where the trigger stands, 0-based.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor

    @property
    def is_trigger(self) -> Tensor:
        """Boolean ``(batch, length)``."""
        return torch.arange(self.inputs.shape[1], device=self.inputs.device) == self.positions[:, None]


def trigger_batch(
    batch: int,
    length: int,
    width: int,
    generator: torch.Generator | None = None,
    position: int | None = None,
    target: Target = "including",
    *,
    dtype: torch.dtype = torch.float32,
) -> TriggerBatch:
    """Draw sequences: BOS, then content tokens with the trigger in place of one of them.

    Args:
        batch: number of sequences, at least 1.
        length: tokens of a sequence with BOS, at least 4; 16 in the paper.
        width: coordinates of a token, at least 4; 16 in the paper.
        generator: on the CPU; the global one by default.
        position: 0-based position of the trigger in all sequences; by default drawn uniformly from ``2 … length - 1`` (the
            paper's 3 … L, counted from 1), so that a content token always precedes it.
        target: what the mean is over; see :data:`Target`.

    Raises:
        ConfigurationError: an argument out of its range.
    """
    for name, value, least in (("batch", batch, 1), ("length", length, 4), ("width", width, 4)):
        if value < least:
            raise ConfigurationError(
                f"trigger task: {name} {value} must be at least {least}; length and width are 16 in the paper"
            )
    if position is not None and not 2 <= position < length:
        raise ConfigurationError(
            f"trigger task: position {position} must be in 2 … {length - 1}, counted from 0: BOS and a content token come first"
        )
    if target not in get_args(Target):
        raise ConfigurationError(f"trigger task: target {target!r} must be one of {', '.join(get_args(Target))}")
    drawn = position is None
    positions = torch.randint(2, length, (batch,), generator=generator) if drawn else torch.full((batch,), position)
    inputs = torch.zeros(batch, length, width, dtype=dtype)
    inputs[:, 0, BOS] = 1
    inputs[:, 1:, TRIGGER + 1 : BIAS] = 2 * torch.rand(batch, length - 1, width - 3, generator=generator, dtype=dtype) - 1
    inputs[:, 1:, BIAS] = 1
    rows = torch.arange(batch)
    inputs[rows, positions, BIAS] = 0
    inputs[rows, positions, TRIGGER] = 1
    # BOS counts in neither sum nor number.
    index = torch.arange(length)
    last = positions if target == "including" else positions - 1
    averaged = (index >= 1) & (index <= last[:, None])
    targets = torch.zeros_like(inputs)
    targets[rows, positions] = (inputs * averaged[..., None]).sum(1) / last[:, None]
    return TriggerBatch(inputs, targets, positions)
