"""Give heads a null score: a term without a key in the softmax, so that silence needs no sink."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import HeadIntervention
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.registry import interventions


@interventions.register("null_score")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NullScore(HeadIntervention):
    """``weights = exp(scores) / (exp(score) + sum over visible keys of exp(scores))``: a softmax with an explicit null logit.

    0 is softmax plus one (Miller 2023); a learned one is that of gpt-oss (arXiv 2508.10925). Added after training, it shows how
    much mass a head would give to no key if it could: it has no value, so outputs shrink by the mass that it takes. Where
    the attention has a null score already, the two are two terms of the denominator, and the null mass is that of both.

    Args:
        score: in units of the scores, the same for every query; minus infinity changes nothing.

    Raises:
        ConfigurationError: a score that is NaN or plus infinity.
        UnsupportedModelError: the operation is no softmax, or its null has a value, which the new one must not carry.
    """

    example: ClassVar[dict[str, object]] = {"score": 1.0}
    neutral: ClassVar[dict[str, object]] = {"score": -math.inf}

    score: float = 0.0

    def __post_init__(self) -> None:
        if math.isnan(self.score) or self.score == math.inf:
            raise ConfigurationError(f"null_score: score must be a number or minus infinity, got {self.score}")

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or self.score == -math.inf

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        if not call.operation.is_softmax:
            raise UnsupportedModelError(
                f"{call.site.module}: a null score is a term of a softmax, and its operation is {call.operation.name!r}; "
                "leave null_score out"
            )
        if call.null_value is not None:
            raise UnsupportedModelError(
                f"{call.site.module}: its null score carries a value ({call.operation.name!r}), and a second one without would "
                "share it; use add_score with place='null'"
            )
        dtype = torch.promote_types(call.queries.dtype, torch.float32)
        given = call.queries.new_full((1, call.num_heads, 1), self.score, dtype=dtype)
        scores = given if call.sink_scores is None else torch.logaddexp(call.sink_scores.to(dtype), given)
        return dataclasses.replace(call, sink_scores=scores)
