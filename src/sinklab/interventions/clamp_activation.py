"""Clamp activations: bound every coordinate of the hidden states, which removes massive activations only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import LayerOutput
from sinklab.attention.intervention import HiddenIntervention, Place, names_nothing
from sinklab.errors import ConfigurationError
from sinklab.interventions._coordinates import coordinates, require_list
from sinklab.registry import interventions


@interventions.register("clamp_activation")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClampActivation(HiddenIntervention):
    """``hidden = min(max(hidden, -limit), limit)`` in the output of the chosen layers, at the chosen positions.

    You need not know where massive activations are (Sun et al. 2024, arXiv 2402.17762): a limit that ordinary numbers keep
    removes them all.

    Args:
        limit: positive or 0, in the units of the hidden states; infinity changes nothing.
        place: positions in the document, or a row of them for each sample; ``None`` for every token that is not padding.
        channels: of the hidden states, from 0; ``None`` for all.

    Raises:
        ConfigurationError: a limit that is negative or NaN, or a channel that the model has not.
    """

    example: ClassVar[dict[str, object]] = {"limit": 0.25}
    neutral: ClassVar[dict[str, object]] = {"limit": math.inf}

    limit: float
    place: Place | None = None
    channels: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.limit >= 0.0:
            raise ConfigurationError(f"clamp_activation: limit must be 0 or more, got {self.limit}")
        if self.channels is not None:
            require_list(self.channels, self.name)

    @property
    def changes_nothing(self) -> bool:
        nowhere = self.place is not None and names_nothing(self.place)
        return super().changes_nothing or self.limit == math.inf or nowhere or (self.channels is not None and not self.channels)

    def edit_hidden(self, output: LayerOutput) -> Tensor:
        hidden = output.hidden_states
        every = range(hidden.shape[-1]) if self.channels is None else self.channels
        chosen, channels = coordinates(output, self.place, every, self.name)
        edited = hidden.clone()
        clamped = edited[..., channels].clamp(-self.limit, self.limit)
        edited[..., channels] = torch.where(chosen[..., None], clamped, edited[..., channels])
        return edited
