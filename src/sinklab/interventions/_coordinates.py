"""Which coordinates of the hidden states an intervention is about."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from sinklab.attention.call import LayerOutput
from sinklab.attention.intervention import Place, tokens_at
from sinklab.errors import ConfigurationError


def require_list(channels: Sequence[int], name: str) -> None:
    """Raise :class:`ConfigurationError` if one number is given in place of a list of channels."""
    if not isinstance(channels, Collection):
        raise ConfigurationError(f"{name}: channels must be a list, also of one, got {channels!r}")


def coordinates(output: LayerOutput, place: Place | None, channels: Sequence[int], name: str) -> tuple[Tensor, list[int]]:
    """Boolean ``(batch, seq_len)``: tokens at a place, of any place if ``None``; and the channels, checked.

    Raises:
        ConfigurationError: a channel that the hidden states have not, or a place that is no position.
    """
    if isinstance(place, str):
        raise ConfigurationError(f"{name}: {place!r} is no place in the hidden states; give positions")
    width = output.hidden_states.shape[-1]
    wrong = [channel for channel in channels if not 0 <= channel < width]
    if wrong:
        raise ConfigurationError(f"{name}: {output.site.module} has no channel {wrong[0]}; expected 0 to {width - 1}")
    counted = output.positions >= 0
    return counted if place is None else counted & tokens_at(output.positions, place, name), list(channels)
