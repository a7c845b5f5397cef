"""Scale heads: multiply their output; 1 changes nothing, 0 removes it, -1 reverses it."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import HeadIntervention
from sinklab.errors import ConfigurationError
from sinklab.registry import interventions


@interventions.register("scale_head")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScaleHead(HeadIntervention):
    """``outputs = factor · outputs``, at every query and under any operation, after output bias and gate.

    The slope of the loss at factor 1 is the importance of Michel et al. 2019 (arXiv 1905.10650).

    Args:
        factor: any finite number.

    Raises:
        ConfigurationError: another one.
    """

    example: ClassVar[dict[str, object]] = {"factor": 0.5}
    neutral: ClassVar[dict[str, object]] = {"factor": 1.0}

    factor: float = 0.5

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor):
            raise ConfigurationError(f"scale_head: factor must be a finite number, got {self.factor}")

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or self.factor == 1.0

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        return outputs * self.factor
