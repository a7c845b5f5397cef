"""Add to a score: make some keys, or the null score, more or less attractive to every query."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import KeyIntervention, keys_at
from sinklab.errors import ConfigurationError
from sinklab.registry import interventions


@interventions.register("add_score")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AddScore(KeyIntervention):
    """``score[t, i] += amount`` for the chosen keys i and every query t that sees them, after scaling and soft cap.

    Under a softmax the odds of the chosen keys against the rest grow by ``exp(amount)``, and the row is normalised anew; so the
    strength of a sink can be raised and lowered without changing its value. Under operations that do not normalise the weight
    of the chosen keys changes alone (for sigmoid, its odds); where scores are not logits (kernels, ReLU) the amount is in units
    of the score.

    Args:
        place: positions in the document, a row of them for each sample, or ``"null"`` for the null score.
        amount: finite; 0 changes nothing. To hide a key give ``hide_key``, which leaves queries that see nothing else alone.

    Raises:
        ConfigurationError: an amount that is not finite.
        UnsupportedModelError: ``"null"`` where the attention has no null score (``null_score`` gives it one).
    """

    example: ClassVar[dict[str, object]] = {"place": 0, "amount": 2.0}
    neutral: ClassVar[dict[str, object]] = {"amount": 0.0}

    amount: float = 2.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.amount):
            raise ConfigurationError(f"add_score: amount must be a finite score, got {self.amount}; to hide a key use hide_key")

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or self.amount == 0.0

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        if self.is_null(call, "null score to add to; give positions, or null_score first"):
            assert call.sink_scores is not None  # the place would be refused
            return dataclasses.replace(call, sink_scores=call.sink_scores + self.amount)
        # Promoted: in half precision the model's own bias would be rounded to the grain of the sum.
        dtype = torch.promote_types(call.queries.dtype, torch.float32)
        added = keys_at(call, self.place)[:, None, None].to(dtype) * self.amount
        bias = added.expand(-1, -1, call.q_len, -1) if call.bias is None else call.bias.to(dtype) + added
        return dataclasses.replace(call, bias=bias)
