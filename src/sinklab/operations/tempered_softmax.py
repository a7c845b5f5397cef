"""Tempered softmax: softmax of the scores divided by a temperature; below 1 it sharpens, above 1 it flattens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from sinklab.attention.operation import State
from sinklab.errors import ConfigurationError
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("tempered_softmax")
@dataclass(frozen=True, kw_only=True)
class TemperedSoftmax(Softmax):
    """``weights = softmax(scores / temperature)`` over visible keys; in [0, 1], rows sum to one and there is no null mass.

    The queries are divided, so a soft cap or position bias of the host model is not: they act on the scores that result.
    Hinton et al. 2015 (arXiv 1503.02531) introduce the softmax temperature.

    Args:
        temperature: positive number; 1 is plain softmax.
    """

    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigurationError(
                f"operation 'tempered_softmax': temperature = {self.temperature} must be a positive number"
            )

    def features(self, queries: Tensor, keys: Tensor, state: State) -> tuple[Tensor, Tensor]:
        return queries / self.temperature, keys
