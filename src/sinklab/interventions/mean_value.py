"""Mean of a value: weights stay, and the value of some keys becomes the mean value of the others."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import KeyIntervention, keys_at
from sinklab.registry import interventions


@interventions.register("mean_value")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MeanValue(KeyIntervention):
    """The values of some keys become, for each query, the mean of the values of the other keys that it sees.

    Their weight is thus spread evenly over the others; the implementation is: ``w[t, i] += w[t, chosen] / n``, with n
    the other visible keys. Unlike a value of 0, the mean has the size and direction of what the head usually reads, so a sink
    whose value is small (Gu et al. 2024, arXiv 2410.10781) is tested for exactly that. Row sums stay, of signed and of
    unnormalised operations too. Queries that see no other key are left as they are.

    Args:
        place: positions in the document, a row of them for each sample, or ``"null"`` for the null value.

    Raises:
        UnsupportedModelError: ``"null"`` where the attention has no null score.
    """

    def edit_weights(
        self, call: AttentionCall, weights: Tensor, null_mass: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        visible = call.visible.block(start, stop, 0, call.kv_len)
        if self.is_null(call, "null value to replace; give positions"):
            number = visible.sum(-1, keepdim=True)
            shares = visible * (null_mass[..., None] / number.clamp_min(1))
            return weights + shares, torch.where(number[..., 0] > 0, torch.zeros_like(null_mass), null_mass)
        chosen = keys_at(call, self.place)[:, None, None] & visible
        others = visible & ~chosen
        number = others.sum(-1, keepdim=True)
        shares = others * ((weights * chosen).sum(-1, keepdim=True) / number.clamp_min(1))
        return torch.where(number > 0, weights.masked_fill(chosen, 0.0) + shares, weights), null_mass
