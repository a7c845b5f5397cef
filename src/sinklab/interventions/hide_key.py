"""Hide keys from heads: with renormalisation the rest of the row grows, without it the head gets less mass."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import KeyIntervention, keys_at
from sinklab.attention.visibility import Visibility
from sinklab.registry import interventions

__all__ = ["HideKey"]


@interventions.register("hide_key")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HideKey(KeyIntervention):
    """Take some keys away from every query that sees another key besides them; queries that do not are left as they are.

    With ``renormalize`` the operation forms weights as if the keys were not there, so a softmax hands their share to the
    others; what follows is the need for a sink (as in Xiao et al. 2023, arXiv 2309.17453, when a window drops the first
    tokens). Without it their weights are set to 0 and nothing takes their place: the head loses what the keys *carry* and
    keeps how much it attends to everything else.

    Args:
        place: positions in the document, a row of them for each sample, or ``"null"`` for the null score.
        renormalize: see above.

    Raises:
        UnsupportedModelError: ``"null"`` where the attention has no null score.
    """

    renormalize: bool = True

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        if self.is_null(call, "null score to hide; give positions"):
            return dataclasses.replace(call, sink_scores=None) if self.renormalize else call
        if not self.renormalize:
            return call
        return dataclasses.replace(call, visible=Without(call.visible, keys_at(call, self.place), call.kv_len))

    def edit_weights(
        self, call: AttentionCall, weights: Tensor, null_mass: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        if self.renormalize:
            return weights, null_mass
        if isinstance(self.place, str):
            return weights, torch.zeros_like(null_mass)
        hidden = keys_at(call, self.place)[:, None, None]
        others = (call.visible.block(start, stop, 0, call.kv_len) & ~hidden).any(-1, keepdim=True)
        return weights.masked_fill(hidden & others, 0.0), null_mass


@dataclasses.dataclass(frozen=True, eq=False)
class Without(Visibility):
    """Another rule less some keys, except for queries that would see nothing at all."""

    rule: Visibility
    hidden: Tensor
    kv_len: int

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        return self._less(self.rule.block(query_start, query_stop, 0, self.kv_len))[..., key_start:key_stop]

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._less(self.rule.pairs(queries, torch.arange(self.kv_len, device=keys.device)))[..., keys]

    def _less(self, seen: Tensor) -> Tensor:
        less = seen & ~self.hidden[:, None, None]
        return torch.where(less.any(-1, keepdim=True), less, seen)
