"""Redirect all of a head's weight to one position: the head is silent as a head with a sink is."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import KeyIntervention, keys_at
from sinklab.registry import interventions


@interventions.register("redirect")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Redirect(KeyIntervention):
    """Put the whole mass of a row, null mass included, on the given keys, in equal parts on those that the query sees.

    This tests what the head contributes beyond its sink: the output becomes the sink's value, not zero. Queries that see
    none of the keys are left as they are.

    Args:
        place: positions in the document, a row of them for each sample, or ``"null"`` for the null score.

    Raises:
        UnsupportedModelError: ``"null"`` where the attention has no null score.
    """

    def edit_weights(
        self, call: AttentionCall, weights: Tensor, null_mass: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        mass = weights.sum(-1) + null_mass
        if self.is_null(call, "null score to redirect to; give a position, or zero the head"):
            return torch.zeros_like(weights), mass
        target = keys_at(call, self.place)[:, None, None] & call.visible.block(start, stop, 0, call.kv_len)
        seen = target.sum(-1, keepdim=True)
        redirected = target.to(weights.dtype) / seen.clamp_min(1) * mass[..., None]
        return (
            torch.where(seen > 0, redirected, weights),
            torch.where(seen[..., 0] > 0, torch.zeros_like(null_mass), null_mass),
        )
