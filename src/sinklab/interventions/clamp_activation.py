"""Clamp activations: bound every coordinate of the hidden states, which removes massive activations only."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import LayerOutput
from sinklab.attention.intervention import HiddenIntervention
from sinklab.errors import ConfigurationError
from sinklab.registry import interventions


@interventions.register("clamp_activation")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClampActivation(HiddenIntervention):
    """``hidden = min(max(hidden, -limit), limit)`` in the output of the chosen layers, of every token that is not padding.

    You need not know where massive activations are (Sun et al. 2024, arXiv 2402.17762): a ``limit``, 0 or more in the units of
    the hidden states, that ordinary numbers keep removes them all; infinity changes nothing."""

    example: ClassVar[dict[str, object]] = {"limit": 0.25}
    neutral: ClassVar[dict[str, object]] = {"limit": math.inf}

    limit: float

    def __post_init__(self) -> None:
        if not self.limit >= 0.0:
            raise ConfigurationError(f"clamp_activation: limit must be 0 or more, got {self.limit}")

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or self.limit == math.inf

    def edit_hidden(self, output: LayerOutput) -> Tensor:
        hidden = output.hidden_states
        return torch.where((output.positions >= 0)[..., None], hidden.clamp(-self.limit, self.limit), hidden)
