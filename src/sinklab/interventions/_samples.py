"""What interventions share that take something from another sample of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.errors import ConfigurationError


def further_on(positions: Tensor, shift: int) -> Tensor:
    """Number of the sample ``shift`` further on in a batch, counted round: int64 ``(batch,)``.

    Args:
        positions: int64 ``(batch, length)``.
    """
    return torch.arange(len(positions), device=positions.device).roll(-shift)


def of_like_length(positions: Tensor, shift: int) -> Tensor:
    """The same where all samples are as long; otherwise the sample ``shift`` further on in the order of their lengths.

    The longest, which none is behind, have the one that is as far before them: as long as can be, where the shortest would have
    nothing at most of their positions (:func:`counted_back` says which of its tokens stand in for those that it lacks).

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


def from_sample(positions: Tensor, documents: Tensor, other: Tensor, *, everywhere: bool = False) -> tuple[Tensor, Tensor]:
    """Where the tokens of every sample stand in another one.

    Args:
        positions, documents: int64 ``(batch, length)``, -1 for padding.
        other: number of the other sample, int64 ``(batch,)``.
        everywhere: whether what the other one lacks is to be taken from another of its positions (:func:`counted_back`).

    Returns:
        int64 ``(batch, length)``: index in the other sample; boolean, the same shape: whether it has such a token.
    """
    wanted, of_document = counted_back(positions, documents, other) if everywhere else (positions, documents)
    same = wanted[:, :, None] == positions[other][:, None]
    same &= of_document[:, :, None] == documents[other][:, None]
    same &= (positions >= 0)[:, :, None]
    return same.int().argmax(-1), same.any(-1)


def counted_back(positions: Tensor, documents: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Positions and documents that another sample has, in the place of those of every sample, int64 ``(batch, length)`` both.

    They are the same as far as the other one has them. Behind its end they are counted back from there, and forth again from
    its beginning, and documents of a packed row likewise from the first one: the nearest that there is at first. Padding is -1.

    Args:
        positions, documents: int64 ``(batch, length)``, -1 for padding.
        other: number of the other sample, int64 ``(batch,)``.
    """
    there, real = documents[other], positions[other] >= 0
    number = (torch.where(real, there, -1).amax(1, keepdim=True) + 1).clamp_min(1)
    chosen = torch.where(documents >= 0, documents % number, -1)
    inside = (there[:, None, :] == chosen[:, :, None]) & real[:, None, :]
    least = positions[other][:, None, :].where(inside, torch.iinfo(torch.int64).max).amin(-1)
    most = positions[other][:, None, :].where(inside, -1).amax(-1)
    least = least.minimum(most)  # of a document that is not there both are -1
    size = (most - least).clamp_min(0)
    away = (positions - least).remainder((2 * size).clamp_min(1))
    reflected = least + torch.where(size > 0, size - (away - size).abs(), 0)
    same = (positions >= least) & (positions <= most)
    return torch.where(same | (positions < 0), positions, reflected), chosen


def require_another(shift: int, call: AttentionCall) -> None:
    """Raise :class:`ConfigurationError` if the sample ``shift`` further on in the batch is the sample itself."""
    samples = len(call.query_positions)
    if shift % samples == 0:
        raise ConfigurationError(
            f"{call.site.module}: the text {shift} samples further in a batch of {samples} is the text itself; give larger "
            "batches or another shift"
        )
