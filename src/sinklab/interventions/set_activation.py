"""Set activations: chosen coordinates of the hidden states, such as massive ones, become 0 or given numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import LayerOutput
from sinklab.attention.intervention import HiddenIntervention, Place, names_nothing, tokens_at
from sinklab.errors import ConfigurationError
from sinklab.registry import interventions


@interventions.register("set_activation")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SetActivation(HiddenIntervention):
    """The numbers at (position, channel) of what some layers put out become others, and the model goes on from there.

    Sun et al. 2024 (arXiv 2402.17762) set massive activations to 0, which ruins a model, and to their mean over texts, which
    does not: they are a constant, whatever the text. Samples that have no such position are left as they are.

    Args:
        place: positions in the document, or a row of them for each sample; ``None`` for every token that is not padding.
        channels: of the hidden states, from 0.
        value: one number or one a channel.

    Raises:
        ConfigurationError: values for another number of channels, a channel that the model has not, or a place that is no
            position.
    """

    example: ClassVar[dict[str, object]] = {"channels": (3, 5), "layers": (0,)}
    neutral: ClassVar[dict[str, object]] = {"channels": ()}

    place: Place | None = 0
    channels: Sequence[int]
    value: float | Sequence[float] | Tensor = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.place, str):
            raise ConfigurationError(f"set_activation: {self.place!r} is no place in the hidden states; give positions")
        if not isinstance(self.channels, Collection):
            raise ConfigurationError(f"set_activation: channels must be a list, also of one, got {self.channels!r}")
        given = tuple(torch.as_tensor(self.value).shape)
        if given not in ((), (len(self.channels),)):
            raise ConfigurationError(
                f"set_activation: {len(self.channels)} channels need one value, or one each; got values of shape {given}"
            )

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or not len(self.channels) or (self.place is not None and names_nothing(self.place))

    def edit_hidden(self, output: LayerOutput) -> Tensor:
        edited, channels = output.hidden_states.clone(), list(self.channels)
        width = edited.shape[-1]
        if wrong := [channel for channel in channels if not 0 <= channel < width]:
            raise ConfigurationError(
                f"set_activation: {output.site.module} has no channel {wrong[0]}; expected 0 to {width - 1}"
            )
        chosen = output.positions >= 0
        if self.place is not None:
            chosen = chosen & tokens_at(output.positions, self.place, self.name)
        edited[..., channels] = torch.where(chosen[..., None], torch.as_tensor(self.value).to(edited), edited[..., channels])
        return edited
