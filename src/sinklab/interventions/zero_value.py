"""Zero the values of some keys: weights stay, and the sink contributes nothing; the test for a key bias."""

from __future__ import annotations

import dataclasses

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import KeyIntervention, keys_at
from sinklab.registry import interventions

__all__ = ["ZeroValue"]


@interventions.register("zero_value")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ZeroValue(KeyIntervention):
    """Set the values of some keys to 0 and leave all weights as they are.

    A sink that only takes mass away, a key bias (Gu et al. 2024, arXiv 2410.10781), is not missed; one that broadcasts
    something to every query is.

    Args:
        place: positions in the document, a row of them for each sample, or ``"null"`` for the null value.

    Raises:
        UnsupportedModelError: ``"null"`` where the attention has no null score.
    """

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        if self.is_null(call, "null value to set to 0; give positions"):
            return dataclasses.replace(call, null_value=None)
        keys = keys_at(call, self.place)[:, None, :, None]
        return dataclasses.replace(call, values=call.values.masked_fill(keys, 0.0))
