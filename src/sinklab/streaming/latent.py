"""Latent: layers of multi-head latent attention, which cache a latent and rotate what is cached beside it.

DeepSeek-V2 (arXiv 2405.04434) and its successors cache two tensors of one head each: the latent, from which the keys and values
of all heads are made, and the rotated coordinates of the keys, which all heads share. The second takes the place that values
have elsewhere. It is the one that moves with positions.
"""

from __future__ import annotations

from torch import Tensor

from sinklab.streaming.held import HeldLayer
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.quantized import QuantizedLayer

__all__ = ["LatentLayer", "QuantizedLatentLayer"]


class _Latent(HeldLayer):
    """Holds what is rotated as its keys and the latent as its values, and is given and gives them the other way round."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write latents ``(batch, 1, length, rank)`` and rotated coordinates ``(batch, 1, length, rotary_dim)`` of new tokens;
        those that this step's queries may see."""
        rotated, latent = super().update(value_states, key_states, *args, **kwargs)
        return latent, rotated


class LatentLayer(_Latent, SlotLayer):
    """A :class:`~sinklab.streaming.layer.SlotLayer` of latents."""


class QuantizedLatentLayer(_Latent, QuantizedLayer):
    """A :class:`~sinklab.streaming.quantized.QuantizedLayer` of latents."""
