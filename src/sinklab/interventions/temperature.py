"""Temperature: divide all scores by one number; attention is sharper below 1 and flatter above."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import HeadIntervention
from sinklab.errors import ConfigurationError
from sinklab.registry import interventions


@interventions.register("temperature")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Temperature(HeadIntervention):
    """``score / temperature`` for every query and key, position bias, soft cap and null score included.

    Under a softmax weights become ``w ** (1 / temperature)``, normalised again. A sink that stands out by a large logit margin
    keeps its mass when attention is flattened; one that wins by a little does not. Operations without normalisation change
    their mass as well (sigmoid, ReLU); linear kernels change by a factor, or not at
    all where they divide by their sum.

    Args:
        temperature: positive and finite; 1 changes nothing.

    Raises:
        ConfigurationError: another one.
    """

    example: ClassVar[dict[str, object]] = {"temperature": 2.0}
    neutral: ClassVar[dict[str, object]] = {"temperature": 1.0}

    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature < math.inf:
            raise ConfigurationError(f"temperature must be positive and finite, got {self.temperature}")

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or self.temperature == 1.0

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        # cap · tanh(x / cap) / T  =  (cap / T) · tanh((x / T) / (cap / T))
        return dataclasses.replace(
            call,
            scaling=call.scaling / self.temperature,
            softcap=None if call.softcap is None else call.softcap / self.temperature,
            bias=None if call.bias is None else call.bias / self.temperature,
            sink_scores=None if call.sink_scores is None else call.sink_scores / self.temperature,
        )
