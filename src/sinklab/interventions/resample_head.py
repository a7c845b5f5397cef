"""Resample a head: replace its output at every query by the one at the same position of another text."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import HeadIntervention
from sinklab.errors import ConfigurationError
from sinklab.registry import interventions


@interventions.register("resample_head")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ResampleHead(HeadIntervention):
    """Resampling ablation: outputs stay what the head usually gives, and stop depending on this text
    (Chan et al. 2022, causal scrubbing).

    Sample b of a batch gets what the model computed, in the same forward, for sample ``b + shift`` (modulo the batch) at the
    same position of its document. Samples of different lengths are counted in the order of their lengths, so that the other
    one has at least as many positions; for the longest it is the one before, whose outputs are reflected at its end: no query
    keeps its own. What a sample gets depends on the batch that it is in. Under any operation, gated or not.

    Args:
        shift: how many samples further the other text is, modulo the batch; 0 for the text itself.

    Raises:
        ConfigurationError: the other text is the same one, because the batch has too few samples.
    """

    example: ClassVar[dict[str, object]] = {"shift": 1}
    neutral: ClassVar[dict[str, object]] = {"shift": 0}

    shift: int = 1

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or self.shift == 0

    @property
    def per_sample(self) -> bool:
        return False

    def given_by(self, call: AttentionCall) -> Tensor:
        """What every sample of the batch has to give, ``(batch, q_len, num_heads, value_dim)``."""
        assert call.head_outputs is not None
        return call.head_outputs

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        samples = len(call.query_positions)
        if self.shift % samples == 0:
            raise ConfigurationError(
                f"{call.site.module}: the text {self.shift} samples further in a batch of {samples} is the text itself; give "
                "larger batches or another shift"
            )
        other = _of_like_length(call.query_positions, self.shift)
        donors = self.given_by(call)[other].transpose(1, 2).to(outputs.dtype)
        source, has_donor = _from_sample(call.query_positions, call.query_documents, other)
        resampled = donors.gather(2, source[:, None, :, None].expand_as(donors))
        return torch.where(has_donor[:, None, :, None], resampled, outputs)


def _of_like_length(positions: Tensor, shift: int) -> Tensor:
    """Number of the sample ``shift`` further on, counted round; of samples of different lengths, in the order of their lengths.

    The longest, which none is behind, have the one that is as far before them: as long as can be, where the shortest would have
    nothing at most of their positions (:func:`_counted_back` says which of its tokens stand in for those that it lacks).

    Args:
        positions: int64 ``(batch, length)``, -1 for padding.
    """
    length = (positions >= 0).sum(1)
    if bool((length == length[:1]).all()):
        return torch.arange(len(positions), device=positions.device).roll(-shift)
    order, number = length.argsort(stable=True), len(positions)
    place = torch.arange(number, device=positions.device)
    ahead, behind = place + shift, place - shift
    chosen = torch.where((behind >= 0) & (behind < number), behind, ahead % number)
    chosen = torch.where((ahead >= 0) & (ahead < number), ahead, chosen)
    return torch.empty_like(order).scatter_(0, order, order[chosen])


def _from_sample(positions: Tensor, documents: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of every sample stand in another one, or what stands in for those that it lacks (:func:`_counted_back`).

    Args:
        positions, documents: int64 ``(batch, length)``, -1 for padding.
        other: number of the other sample, int64 ``(batch,)``.

    Returns:
        int64 ``(batch, length)``: index in the other sample; boolean, the same shape: whether it has such a token.
    """
    wanted, of_document = _counted_back(positions, documents, other)
    same = wanted[:, :, None] == positions[other][:, None]
    same &= of_document[:, :, None] == documents[other][:, None]
    same &= (positions >= 0)[:, :, None]
    return same.int().argmax(-1), same.any(-1)


def _counted_back(positions: Tensor, documents: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
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
