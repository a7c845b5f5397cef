"""Random rotations: directions without meaning, as controls of directions that may have one."""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor


@functools.lru_cache(maxsize=256)
def random_rotation(key: str, width: int) -> Tensor:
    """An orthogonal float64 matrix ``(width, width)``, drawn with Haar measure, determined by the key; do not write to it."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    rotation, triangle = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    # QR alone is not uniform: the signs of the diagonal must be taken out (Mezzadri 2007, arXiv math-ph/0609050).
    return rotation * triangle.diagonal().sign()
