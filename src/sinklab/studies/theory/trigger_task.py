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
    """Sequences with the same number of triggers each.

    Attributes:
        inputs: ``(batch, length, width)``.
        targets: same shape: the mean at every trigger, 0 elsewhere. A model with residual connections is to give
            ``inputs + targets``.
        positions: int64 ``(batch, triggers)``: where the triggers stand, 0-based, ascending.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor

    @property
    def is_trigger(self) -> Tensor:
        """Boolean ``(batch, length)``."""
        places = torch.arange(self.inputs.shape[1], device=self.inputs.device)
        return (places == self.positions[..., None]).any(dim=1)


def trigger_batch(
    batch: int,
    length: int,
    width: int,
    generator: torch.Generator | None = None,
    position: int | None = None,
    target: Target = "including",
    *,
    triggers: int = 1,
    dtype: torch.dtype = torch.float32,
) -> TriggerBatch:
    """Draw sequences: BOS, then content tokens with triggers in the place of some of them.

    The target at a trigger is the mean of *all* tokens behind BOS up to it, whatever they are: one of several triggers averages
    the earlier ones together with the content. With the target ``"including"`` a trigger at ``j`` (0-based) averages the ``j``
    tokens ``1 … j``, with ``"preceding"`` the ``j - 1`` tokens ``1 … j - 1``.

    Args:
        batch: number of sequences, at least 1.
        length: tokens of a sequence with BOS, at least 4; 16 in the paper.
        width: coordinates of a token, at least 4; 16 in the paper.
        generator: on the CPU; the global one by default.
        position: 0-based position of a trigger in all sequences; by default all are drawn uniformly from ``2 … length - 1``
            (the paper's 3 … L, counted from 1), so that a content token always precedes them.
        target: what the mean is over; see :data:`Target`.
        triggers: in each sequence, at distinct places; from 1, as in the paper, to ``length - 3``, so that not every token from
            the third on is one.

    Raises:
        ConfigurationError: an argument out of its range.
    """
    for name, value, least in (("batch", batch, 1), ("length", length, 4), ("width", width, 4)):
        if value < least:
            raise ConfigurationError(
                f"trigger task: {name} {value} must be at least {least}; length and width are 16 in the paper"
            )
    if not 1 <= triggers <= length - 3:
        raise ConfigurationError(
            f"trigger task: {triggers} triggers in {length} tokens; expected 1 … {length - 3}: BOS and a content token come "
            "first, and some later token is no trigger"
        )
    if position is not None and not 2 <= position < length:
        raise ConfigurationError(
            f"trigger task: position {position} must be in 2 … {length - 1}, counted from 0: BOS and a content token come first"
        )
    if target not in get_args(Target):
        raise ConfigurationError(f"trigger task: target {target!r} must be one of {', '.join(get_args(Target))}")
    positions = _positions(batch, length, generator, position, triggers)
    places = torch.arange(length)
    triggered = (places == positions[..., None]).any(dim=1).to(dtype)
    inputs = torch.zeros(batch, length, width, dtype=dtype)
    inputs[:, 0, BOS] = 1
    content = torch.rand(batch, length - 1, width - 3, generator=generator, dtype=dtype)
    inputs[:, 1:, TRIGGER + 1 : BIAS] = content.mul_(2).sub_(1)
    inputs[..., TRIGGER] = triggered
    inputs[:, 1:, BIAS] = 1 - triggered[:, 1:]
    targets = inputs.cumsum(dim=1)
    targets[..., BOS] = 0  # which counts in neither sum nor number
    if target == "preceding":
        targets -= inputs
    counts = (places if target == "including" else places - 1).clamp(min=1)
    targets.div_(counts[:, None]).mul_(triggered[..., None])
    return TriggerBatch(inputs, targets, positions)


def _positions(batch: int, length: int, generator: torch.Generator | None, position: int | None, triggers: int) -> Tensor:
    """Distinct places from the third on, ascending, ``(batch, triggers)``; one of them ``position``, if it is given."""
    if triggers == 1:
        drawn = torch.randint(2, length, (batch,), generator=generator) if position is None else torch.full((batch,), position)
        return drawn[:, None]
    order = torch.rand(batch, length - 2, generator=generator)
    if position is not None:
        order[:, position - 2] = 1  # above all that is drawn
    return order.topk(triggers).indices.sort().values + 2
