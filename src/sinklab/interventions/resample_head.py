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
    """Resampling ablation: outputs stay what the head usually gives, and stop depending on this text (Chan et al. 2022, causal
    scrubbing).

    Sample b of a batch gets what the model computed, in the same forward, for sample ``b + shift`` (modulo the batch; 0 for
    itself) at the same position. Samples of different lengths are counted in the order of their lengths, so that the other one
    has at least as many positions; for the longest it is the one before, reflected at its end. Under any operation, gated or
    not.

    Raises:
        ConfigurationError: the other text is the same one, because the batch has too few samples; or rows of several
            documents.
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
        if bool((call.query_documents > 0).any()):
            raise ConfigurationError(
                f"{call.site.module}: a row of several documents has no other text; give one document a row"
            )
        if self.shift % samples == 0:
            raise ConfigurationError(
                f"{call.site.module}: the text {self.shift} samples further in a batch of {samples} is the text itself; give "
                "larger batches or another shift"
            )
        other = _of_like_length(call.query_positions, self.shift)
        donors = self.given_by(call)[other].transpose(1, 2).to(outputs.dtype)
        source = _tokens_of(call.query_positions, other)
        resampled = donors.gather(2, source[:, None, :, None].expand_as(donors))
        return torch.where((call.query_positions >= 0)[:, None, :, None], resampled, outputs)


def _of_like_length(positions: Tensor, shift: int) -> Tensor:
    """Number of the sample ``shift`` further on, counted round; of samples of different lengths, in the order of their lengths,
    where the longest, which none is behind, have the one as far before them."""
    length = (positions >= 0).sum(1)
    if bool((length == length[:1]).all()):
        return torch.arange(len(positions), device=positions.device).roll(-shift)
    order, number = length.argsort(stable=True), len(positions)
    place = torch.arange(number, device=positions.device)
    ahead, behind = place + shift, place - shift
    chosen = torch.where((behind >= 0) & (behind < number), behind, ahead % number)
    chosen = torch.where((ahead >= 0) & (ahead < number), ahead, chosen)
    return torch.empty_like(order).scatter_(0, order, order[chosen])


def _tokens_of(positions: Tensor, other: Tensor) -> Tensor:
    """Index, int64 ``(batch, length)``, of the token of another sample that stands at every position; behind its end they are
    counted back from there, and forth again from its beginning."""
    there = positions[other]
    most = there.amax(1, keepdim=True)
    least = torch.where(there >= 0, there, most).amin(1, keepdim=True)
    size = (most - least).clamp_min(1)
    away = (positions - least).remainder(2 * size)
    wanted = size - (away - size).abs()
    return (there >= 0).int().argmax(1, keepdim=True) + wanted.minimum(most - least)
