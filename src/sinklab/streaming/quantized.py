"""Quantised layer: the ring of a cache in int8, its sinks in full precision; a quarter of the memory of float32."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.models.grids import symmetric_grid
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.step import Step

__all__ = ["QuantizedLayer"]

BITS = 8


class QuantizedLayer(SlotLayer):
    """A :class:`SlotLayer` whose keys and values are int8 between the steps, with one scale for each head of a token.

    A key or value ``x`` is kept as ``round(x / scale)`` with ``scale = max |x| / 127``, so it comes back within ``scale / 2``.
    Keys of the window are never rotated again, so a token is rounded once, when it is written, and once more whenever
    positions are counted anew. Pinned tokens keep their dtype: so much attention rests on their keys that rounding these
    would cost most.

    A step widens the whole layer, one layer at a time: it takes more time than without, and less memory. Tokens of
    one chunk see each other unrounded, so results depend on the size of chunks as far as rounding goes.

    Attributes:
        codes: int8 keys and values ``(batch, num_kv_heads, slots, head_dim)``.
        scales: float32, ``(batch, num_kv_heads, slots, 1)`` each.
        sinks: values of the pinned tokens, ``(batch, num_kv_heads, pinned, head_dim)``, in the dtype of the model.
    """

    buffers: ClassVar[tuple[str, ...]] = ("key_codes", "key_scales", "value_codes", "value_scales", "masters", "sinks")

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    sinks: Tensor

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        super().allocate(key_states, value_states)
        self.key_codes, self.value_codes = (states.to(torch.int8) for states in (self.keys, self.values))
        self.key_scales, self.value_scales = (
            torch.zeros_like(states[..., :1], dtype=torch.float32) for states in (self.keys, self.values)
        )
        self.sinks = self.values[:, :, : self.fixed].clone()
        self._drop()

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._widen()
        try:
            result = super().update(key_states, value_states)
            assert isinstance(self.table.step, Step)
            self._narrow(self.table.step)
        finally:
            self._drop()
        return result

    def move(self, steps: Tensor) -> None:
        if self.is_initialized:
            self._widen()
            super().move(steps)
            self._narrow(None)
            self._drop()

    def restore(self, buffers: dict[str, Tensor]) -> None:
        super().restore(buffers)
        self.dtype = self.sinks.dtype

    def _drop(self) -> None:
        """Between the steps there are the codes alone."""
        for name in ("keys", "values"):
            setattr(self, name, None)

    def _widen(self) -> None:
        """Keys and values of this layer in the dtype of the model, for one step."""
        self.keys = (self.key_codes * self.key_scales).to(self.dtype)
        self.values = (self.value_codes * self.value_scales).to(self.dtype)
        self.values[:, :, : self.fixed] = self.sinks
        # As long as none has been moved; a step that moves them does so from the masters too.
        self.keys[:, :, : self.fixed] = self.masters

    def _narrow(self, step: Step | None) -> None:
        """Round what the step has written, or without one everything; what was rounded before stays as it is."""
        for held, codes, scales in (
            (self.keys, self.key_codes, self.key_scales),
            (self.values, self.value_codes, self.value_scales),
        ):
            if step is not None and isinstance(step.slot, int):
                given = slice(step.slot, step.slot + 1)
                codes[:, :, given], scales[:, :, given] = _rounded(held[:, :, given])
                continue
            if step is None:
                written = torch.ones(1, held.shape[2], dtype=torch.bool, device=held.device)
            elif step.source is not None:
                written = step.source >= 0
            else:
                assert isinstance(step.slot, Tensor)
                written = torch.nn.functional.one_hot(step.slot, held.shape[2]).bool()
            new_codes, new_scales = _rounded(held)
            codes.copy_(torch.where(written[:, None, :, None], new_codes, codes))
            scales.copy_(torch.where(written[:, None, :, None], new_scales, scales))
        self.sinks = self.values[:, :, : self.fixed].clone()


def _rounded(states: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of keys or values ``(…, head_dim)``."""
    grid = symmetric_grid(states.abs().amax(dim=-1, keepdim=True), BITS)
    return grid.codes(states), grid.scale
