"""Grids: real numbers as integer codes with a scale and a zero point; all quantisation in sinklab is by these definitions."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["Grid", "RunningGrid", "affine_grid", "symmetric_grid"]


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """``codes = clamp(round(x / scale) + zero, lowest, highest)``, which stand for ``(codes - zero) · scale``.

    0 lies on the grid. Ties are rounded to even, and the division is a product with ``1 / scale``, as in torch's own kernels.

    Attributes:
        scale: float32, positive; broadcasts with what is quantised.
        zero: int32, the code of 0; broadcasts too.
        lowest, highest: codes; they fit int8 for 8 bits or fewer, else int32.
    """

    scale: Tensor
    zero: Tensor
    lowest: int
    highest: int

    def codes(self, values: Tensor) -> Tensor:
        """int8 (int32 above 8 bits), of the shape of the values; what lies outside of the range takes its end."""
        rounded = torch.round(values.float() * (1.0 / self.scale)) + self.zero
        return rounded.clamp_(self.lowest, self.highest).to(torch.int8 if self.highest <= 127 else torch.int32)

    def widened(self, codes: Tensor) -> Tensor:
        """What codes stand for, float32."""
        return (codes.to(torch.int32) - self.zero) * self.scale

    def __call__(self, values: Tensor) -> Tensor:
        """The values on the grid, in their own dtype: within half a scale of them inside the range."""
        return self.widened(self.codes(values)).to(values.dtype)


def symmetric_grid(largest: Tensor, bits: int) -> Grid:
    """``2^bits - 1`` values around 0, the outer ones at ``largest``.

    Args:
        largest: absolute values, 0 or more; a tensor of one number, or of one for each grid, such as ``(rows, 1)``.
    """
    most = 2 ** (bits - 1) - 1
    scale = _positive(largest.float() / most)
    return Grid(scale, torch.zeros_like(scale, dtype=torch.int32), -most, most)


def affine_grid(low: Tensor, high: Tensor, bits: int) -> Grid:
    """``2^bits`` values from ``low`` to ``high``, moved by less than a step so that 0 is one of them; a range without 0 is
    widened to it."""
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = _positive((high - low) / (highest - lowest))
    zero = (lowest - torch.round(low / scale)).clamp(lowest, highest).to(torch.int32)
    return Grid(scale, zero, lowest, highest)


def _positive(scale: Tensor) -> Tensor:
    """Where all is 0 any scale will do; its inverse must be a number."""
    return scale.clamp(min=torch.finfo(torch.float32).tiny * 4)


class RunningGrid:
    """An affine grid whose range follows a running minimum and maximum of what it is shown, until observing ends.

    Values are on the grid already while the range is estimated, as in the release of Bondarenko et al. 2023 (arXiv 2306.12929).

    Args:
        bits: of the codes.
        momentum: of the running minimum and maximum.
    """

    def __init__(self, bits: int, momentum: float) -> None:
        self.bits, self.momentum, self.observing = bits, momentum, True
        self._range: tuple[Tensor, Tensor] | None = None
        self.grid: Grid | None = None

    def __call__(self, values: Tensor) -> Tensor:
        if self.observing or self.grid is None:
            low, high = values.detach().float().aminmax()
            if self._range is not None:
                low, high = (old + (1 - self.momentum) * (new - old) for old, new in zip(self._range, (low, high), strict=True))
            self._range = low, high
            self.grid = affine_grid(low, high, self.bits)
        return self.grid(values)
