"""Rotation table: keys moved by whole steps whose angles are worked out once, because the steps are few and come again."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.streaming.rotation import Rotation

__all__ = ["RotationTable"]


class RotationTable:
    """Cosines and sines of ``-span`` to ``span`` steps.

    Args:
        rotation: of the keys.
        span: the most steps, forwards and backwards.
        dtype: of the results, float32 or float64; angles are float64.
        device: of keys and steps.
    """

    def __init__(self, rotation: Rotation, span: int, dtype: torch.dtype, device: torch.device) -> None:
        self.span = span
        self.cosines, self.sines = rotation.cosines_and_sines(torch.arange(-span, span + 1, device=device), dtype)
        self._first, self._second = _slice(rotation.first), _slice(rotation.second)

    def rotated(self, keys: Tensor, steps: Tensor) -> Tensor:
        """Keys ``(…, n, head_dim)`` moved by ``steps``, int64 ``(…, n)`` or ``(n,)``, in the dtype of the table."""
        wide = keys.to(self.cosines.dtype)
        at = steps + self.span
        cosines, sines = self.cosines[at], self.sines[at]
        result = wide.clone()
        first, second = wide[..., self._first], wide[..., self._second]
        torch.mul(first, cosines, out=result[..., self._first]).addcmul_(second, sines, value=-1)
        torch.mul(first, sines, out=result[..., self._second]).addcmul_(second, cosines)
        return result


def _slice(coordinates: Tensor) -> slice:
    """Coordinates of the pairs, which are consecutive or every other one (:func:`read_rotations` tries no other)."""
    places = coordinates.tolist()
    step = places[1] - places[0] if len(places) > 1 else 1
    assert places == list(range(places[0], places[-1] + 1, step))
    return slice(places[0], places[-1] + 1, step)
