"""Floating-point formats of eight and four bits, with their scales: FP8 (e4m3), MXFP4 and NVFP4 (e2m1 in blocks).

FP8: Micikevicius et al. 2022 (arXiv 2209.05433). MXFP4: OCP Microscaling Formats 1.0 (Rouhani et al. 2023, arXiv 2310.10537).
NVFP4: NVIDIA 2025 (arXiv 2509.25149). Numbers are rounded to the nearest, ties to even, and saturate.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError

E4M3, E2M1 = 448.0, 6.0
"""Largest numbers of the formats."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1, by the three bits of its code beside the sign."""

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between two of them; every second one goes up, to the even code."""


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """Numbers of ``bits`` bits, a ``block`` of which, along the last axis, share a scale; without one, all of a tensor do.

    Codes are uint8, of four bits two in a byte (the first half of the last axis in the lower bits); scales are float32, or of
    formats of four bits the uint8 of e8m0 (MXFP4) or e4m3 (NVFP4, which has a float32 scale of the whole beside them).
    """

    name: str
    bits: int
    block: int | None
    scales: torch.dtype = torch.float32

    def require(self, size: int, what: str) -> int:
        """Numbers of a block in a last axis of ``size``, which must hold whole blocks."""
        block = min(self.block or size, size)
        if size % block or (self.bits == 4 and size % 2):
            raise ConfigurationError(f"{self.name} has blocks of {block}, and {what} have {size} channels; take int8")
        return block

    def encode(self, values: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales ``(…, blocks)`` and the scale of the whole, which broadcasts with the values.

        Args:
            values: ``(…, size)``, whole blocks.
            largest: absolute value that the whole is scaled to, known beforehand or of a part; it broadcasts with the values.
        """
        wide, most = values.float(), E4M3 if self.bits == 8 else E2M1
        whole = wide.abs().amax() if largest is None else largest.float()
        if self.block is None:
            scale = _positive(whole / most)
            return _e4m3(wide / scale).view(torch.uint8), scale.new_empty(*values.shape[:-1], 0), scale
        blocks = wide.unflatten(-1, (-1, min(self.block, wide.shape[-1])))
        peaks = blocks.abs().amax(-1)
        if self.scales == torch.float32:
            whole, scales = torch.ones_like(whole), _positive(peaks / most)
            kept = wide_scales = scales
        elif self.scales == torch.uint8:  # e8m0: a power of two, by which the largest number keeps its exponent
            whole = torch.ones_like(whole)
            exponents = (torch.frexp(peaks).exponent - 1 - 2).clamp(-127, 127)
            kept, wide_scales = (exponents + 127).to(torch.uint8), torch.exp2(exponents.float())
        else:
            whole = _positive(whole / (E4M3 * E2M1))
            rounded = _e4m3(peaks / most / whole)
            kept, wide_scales = rounded.view(torch.uint8), _positive(rounded.float() * whole)
        numbers = (blocks / wide_scales[..., None]).flatten(-2)
        return (_e4m3(numbers).view(torch.uint8) if self.bits == 8 else _e2m1(numbers)), kept, whole

    def decode(self, codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
        """What codes stand for, float32 ``(…, size)``."""
        if self.bits == 8:
            numbers = codes.view(torch.float8_e4m3fn).float()
        else:
            table = torch.tensor((*VALUES, *(-value for value in VALUES)), device=codes.device)
            numbers = table[torch.cat((codes & 15, codes >> 4), dim=-1).int()]
        if self.block is None:
            return numbers * whole
        if self.scales == torch.uint8:
            wide = torch.exp2(scales.float() - 127)
        else:
            wide = scales if scales.dtype == torch.float32 else scales.view(torch.float8_e4m3fn).float() * whole
        return (numbers.unflatten(-1, (wide.shape[-1], -1)) * wide[..., None]).flatten(-2)

    def __call__(self, values: Tensor, largest: Tensor | None = None) -> Tensor:
        """The values on the format, in their own dtype; blocks that the last axis does not fill are filled with 0."""
        short = -values.shape[-1] % self.block if self.block and values.shape[-1] > self.block else 0
        filled = torch.nn.functional.pad(values, (0, short + (values.shape[-1] + short) % 2))
        return self.decode(*self.encode(filled, largest))[..., : values.shape[-1]].to(values.dtype)


def _positive(scale: Tensor) -> Tensor:
    """Where all is 0 any scale will do."""
    return scale.clamp(min=torch.finfo(torch.float32).tiny * 4)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3, E4M3).to(torch.float8_e4m3fn)


def _e2m1(values: Tensor) -> Tensor:
    """Codes of four bits, two in a byte."""
    ends = torch.tensor(TIES, device=values.device)
    ends[1::2] = torch.nextafter(ends[1::2], torch.zeros(()).to(ends))
    codes = torch.bucketize(values.abs(), ends) | (values < 0) * 8
    lower, upper = codes.to(torch.uint8).chunk(2, dim=-1)
    return lower | (upper << 4)


FORMATS: dict[str, FloatFormat] = {
    one.name: one
    for one in (
        FloatFormat("fp8", 8, None),
        FloatFormat("fp8b", 8, 128),
        FloatFormat("mxfp4", 4, 32, torch.uint8),
        FloatFormat("nvfp4", 4, 16, torch.float8_e4m3fn),
    )
}
"""By name: e4m3 with one scale a tensor and one for 128 numbers, MXFP4, NVFP4."""


@dataclasses.dataclass(frozen=True, eq=False)
class FloatWeights:
    """The weights of a linear map on a format."""

    values: Tensor  # float32 (out_features, in_features)
    bytes: int  # of codes and scales

    @staticmethod
    def of(kind: FloatFormat, weight: Tensor) -> FloatWeights:
        """Blocks are along the inputs, and the whole is the matrix."""
        values = kind(weight.detach().float())
        scales = weight.shape[0] * -(-weight.shape[1] // kind.block) * kind.scales.itemsize if kind.block else 0
        whole = 4 if kind.name in ("fp8", "nvfp4") else 0
        return FloatWeights(values, -(-weight.numel() * kind.bits // 8) + scales + whole)

    def widened(self) -> Tensor:
        """What the codes stand for, float32 ``(out_features, in_features)``."""
        return self.values


@dataclasses.dataclass(frozen=True, eq=False)
class FloatInputs:
    """Inputs of a linear map on a format; ``largest`` is known from calibration, or is that of each token."""

    kind: FloatFormat
    largest: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """``(rows, in_features)`` on the format."""
        return self.kind(rows, rows.abs().amax(1, keepdim=True) if self.largest is None else self.largest)
