"""Hybrid: layers that attend and do linear attention at once, side by side on the same tokens (Falcon-H1, Zamba2).

Their keys are bounded by the policy, and the states of their linear attention are kept as in
:mod:`sinklab.streaming.recurrent`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from sinklab.streaming.held import HeldLayer
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.quantized import QuantizedLayer
from sinklab.streaming.recurrent import restore_states, states_of

__all__ = ["HybridLayer", "QuantizedHybridLayer"]


class _Hybrid(HeldLayer, LinearAttentionLayer):
    """Keys and values in slots, and states.

    Args:
        settings: of the layer of slots.
        states: how many states the layer keeps.
    """

    def __init__(self, *settings: Any, states: int) -> None:
        super().__init__(*settings)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Allocate buffers for keys and values, or make room for a state."""
        if keys_and_values:
            super().lazy_initialization(*keys_and_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def bytes_held(self) -> int:
        return super().bytes_held() + sum(state.nbytes for state in states_of(self).values())

    def release(self) -> None:
        super().release()
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def state(self) -> dict[str, Tensor]:
        return super().state() | states_of(self)

    def restore(self, buffers: dict[str, Tensor]) -> None:
        super().restore(buffers)
        restore_states(self, buffers)

    def take(self, rows: Tensor) -> None:
        super().take(rows)
        LinearAttentionLayer.reorder_cache(self, rows)

    def reset(self) -> None:
        super().reset()
        LinearAttentionLayer.reset(self)


class HybridLayer(_Hybrid, SlotLayer):
    """A :class:`~sinklab.streaming.layer.SlotLayer` with states."""


class QuantizedHybridLayer(_Hybrid, QuantizedLayer):
    """A :class:`~sinklab.streaming.quantized.QuantizedLayer` with states, which stay as they are."""
