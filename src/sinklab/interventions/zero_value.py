"""Zero the values of some keys: weights stay, and the sink contributes nothing; the test for a key bias."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import KeyIntervention, keys_at, tokens_at
from sinklab.registry import interventions


@interventions.register("zero_value")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ZeroValue(KeyIntervention):
    """Some keys contribute 0 to the outputs of all queries but those that stand on them; no other weight changes.

    A sink that only takes mass away, a key bias (Gu et al. 2024, arXiv 2410.10781), is not missed; one that broadcasts
    something to every query is. Queries that stand on the keys are left as they are: what a first token, which sees nothing
    else, makes of itself is how the sink comes about, and not what it says to others.

    Args:
        place: positions in the document, a row of them for each sample, or ``"null"`` for the null value.

    Raises:
        UnsupportedModelError: ``"null"`` where the attention has no null score.
    """

    version = 2  # 1 took the value from the sink's own query, too

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        null = self.is_null(call, "null value to set to 0; give positions")
        return dataclasses.replace(call, null_value=None) if null else call

    def edit_weights(
        self, call: AttentionCall, weights: Tensor, null_mass: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        if isinstance(self.place, str):
            return weights, null_mass
        keys = keys_at(call, self.place)[:, None, None]
        if call.site.kind == "self":
            standing = tokens_at(call.query_positions[:, start:stop], self.place, call.site.module)
            keys = keys & ~standing[:, None, :, None]
        return weights.masked_fill(keys, 0.0), null_mass
