"""What interventions share that take something from another sample of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.errors import ConfigurationError

__all__ = ["from_sample", "further_on", "of_like_length", "require_another"]


def further_on(positions: Tensor, shift: int) -> Tensor:
    """Number of the sample ``shift`` further on in a batch, counted round: int64 ``(batch,)``.

    Args:
        positions: int64 ``(batch, length)``.
    """
    return torch.arange(len(positions), device=positions.device).roll(-shift)


def of_like_length(positions: Tensor, shift: int) -> Tensor:
    """The same where all samples are as long; otherwise the sample ``shift`` further on in the order of their lengths.

    The longest, which none is behind, have the one that is as far before them: as long as can be, where the shortest would have
    nothing at most of their positions.

    Args:
        positions: int64 ``(batch, length)``, -1 for padding.
    """
    length = (positions >= 0).sum(1)
    if bool((length == length[:1]).all()):
        return further_on(positions, shift)
    order, number = length.argsort(stable=True), len(positions)
    place = torch.arange(number, device=positions.device)
    ahead, behind = place + shift, place - shift
    chosen = torch.where((behind >= 0) & (behind < number), behind, ahead % number)
    chosen = torch.where((ahead >= 0) & (ahead < number), ahead, chosen)
    return torch.empty_like(order).scatter_(0, order, order[chosen])


def from_sample(positions: Tensor, documents: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of every sample stand in another one.

    Args:
        positions, documents: int64 ``(batch, length)``, -1 for padding.
        other: number of the other sample, int64 ``(batch,)``.

    Returns:
        int64 ``(batch, length)``: index in the other sample; boolean, the same shape: whether it has such a token.
    """
    same = positions[:, :, None] == positions[other][:, None]
    same &= documents[:, :, None] == documents[other][:, None]
    same &= (positions >= 0)[:, :, None]
    return same.int().argmax(-1), same.any(-1)


def require_another(shift: int, call: AttentionCall) -> None:
    """Raise :class:`ConfigurationError` if the sample ``shift`` further on in the batch is the sample itself."""
    samples = len(call.query_positions)
    if shift % samples == 0:
        raise ConfigurationError(
            f"{call.site.module}: the text {shift} samples further in a batch of {samples} is the text itself; give larger "
            "batches or another shift"
        )
