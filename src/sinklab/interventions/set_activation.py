"""Set activations: chosen coordinates of the hidden states, such as massive ones, become 0, their mean, or given numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sinklab.attention.call import LayerOutput
from sinklab.attention.intervention import HiddenIntervention, Place, names_nothing
from sinklab.errors import ConfigurationError
from sinklab.interventions._coordinates import coordinates, require_list
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
        mode: ``"zero"``; ``"mean"``, over the samples of the batch that have the position (an effect then depends on the batch;
            for a mean over more texts give it as value); or ``"value"``.
        value: for that mode, one number or one a channel.

    Raises:
        ConfigurationError: an unknown mode, a value without mode ``"value"``, values for another number of channels, or a
            channel that the model has not.
    """

    example: ClassVar[dict[str, object]] = {"channels": (3, 5), "layers": (0,)}
    neutral: ClassVar[dict[str, object]] = {"channels": ()}

    place: Place | None = 0
    channels: Sequence[int]
    mode: Literal["zero", "mean", "value"] = "zero"
    value: float | Sequence[float] | Tensor = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("zero", "mean", "value"):
            raise ConfigurationError(f"set_activation: mode must be zero, mean or value, got {self.mode!r}")
        require_list(self.channels, self.name)
        given = tuple(torch.as_tensor(self.value).shape)
        if given not in ((), (len(self.channels),)):
            raise ConfigurationError(
                f"set_activation: {len(self.channels)} channels need one value, or one each; got values of shape {given}"
            )
        if self.mode != "value" and bool(torch.as_tensor(self.value).any()):
            raise ConfigurationError(
                f"set_activation: value {self.value} is given, and mode {self.mode} takes none; give mode='value', or no value"
            )

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or not len(self.channels) or (self.place is not None and names_nothing(self.place))

    @property
    def per_sample(self) -> bool:
        return self.mode != "mean"

    def edit_hidden(self, output: LayerOutput) -> Tensor:
        hidden = output.hidden_states
        chosen, channels = coordinates(output, self.place, self.channels, self.name)
        new = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        if self.mode == "value":
            new = torch.as_tensor(self.value).to(hidden)
        if self.mode == "mean":
            new = _means(hidden[..., channels].double(), output.positions).to(hidden.dtype)
        edited = hidden.clone()
        edited[..., channels] = torch.where(chosen[..., None], new, edited[..., channels])
        return edited


def _means(values: Tensor, positions: Tensor) -> Tensor:
    """Mean over all samples of the values ``(batch, seq_len, channels)`` at the same position, for every token."""
    row = positions.clamp_min(0).flatten()
    counted = (positions >= 0).flatten()[:, None].to(values)
    totals = values.new_zeros(int(row.max()) + 1, values.shape[-1])
    sums = totals.index_add(0, row, values.flatten(0, 1) * counted)
    counts = totals[:, :1].index_add(0, row, counted)
    return (sums / counts.clamp_min(1))[row].view_as(values)
