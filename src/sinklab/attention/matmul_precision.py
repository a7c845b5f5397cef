"""Float32 matrix products on a CPU by oneDNN instead of MKL, where that has proved, on this machine, to stay float32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn

__all__ = ["fast_float32", "is_float32_product", "linear_sizes"]

_ERROR_BOUND = 4e-6
"""On |product − exact| / (|row| · |column|), for random factors. Float32 products of 65 to 257 terms stay near 3e-7; factors
rounded to TF32 (2⁻¹²) or bfloat16 (2⁻⁹) exceed it a hundredfold in the worst of the many thousand entries that are compared."""

_LARGEST = 512
"""Most rows and columns, and an eighth of the inner dimension, of a product that is checked for a whole model: which kernel is
chosen does not depend on more."""

Size = tuple[int, int, int]
"""Of a matrix product: its inner dimension, and rows and columns of the result."""


class _Switch(Protocol):
    fp32_precision: str


@contextlib.contextmanager
def fast_float32(sizes: Iterable[Size]) -> Iterator[bool]:
    """Multiply float32 matrices by the fastest library that does so in float32 accuracy, until the block ends.

    The permission to compute in bfloat16 makes oneDNN take over from MKL. On a CPU without bfloat16 matrix units it does not
    use the permission and runs its AVX-512 float32 kernel, twice as fast as MKL on AMD processors; on a CPU that has them it
    would round. So the permission is given only where products of these very sizes have been compared with float64, and
    otherwise taken away, whatever the process has set. Products of a matrix and a vector are slower under it.

    Args:
        sizes: of the largest products of each kind.

    Yields:
        Whether the products were handed over.
    """
    switch = _switch()
    if switch is None:
        yield False
        return
    before, proved = switch.fp32_precision, all(is_float32_product(*size) for size in sizes)
    switch.fp32_precision = "bf16" if proved else "ieee"
    try:
        yield proved
    finally:
        switch.fp32_precision = before


def linear_sizes(model: nn.Module, tokens: int) -> list[Size]:
    """Of the products of all linear maps of a model, in the forward pass and both of the backward pass, for so many tokens."""
    shapes = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)}
    # Inner dimension, rows and columns of outputs, gradient of the inputs, and gradient of the weight.
    products = {
        size for wide, narrow in shapes for size in ((narrow, tokens, wide), (wide, tokens, narrow), (tokens, wide, narrow))
    }
    return sorted(
        {(min(inner, 8 * _LARGEST), min(rows, _LARGEST), min(columns, _LARGEST)) for inner, rows, columns in products}
    )


@functools.cache
def is_float32_product(inner: int, rows: int, columns: int) -> bool:
    """Whether products keep float32 accuracy with the permission to compute in bfloat16.

    Checked once per process and size, on the full tile and on a ragged one, alone and in a batch, because the kernel is chosen
    by size.
    """
    switch = _switch()
    if switch is None:
        return False
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator)
    right = torch.randn(columns, inner, generator=generator)
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        factors = [(left[:r], right[:c].t()) for r, c in ((rows, columns), (rows - rows // 3, columns // 3 + 1))]
        products = [torch.mm(*pair) for pair in factors]
        products += [torch.bmm(*(factor.expand(2, -1, -1) for factor in pair))[1] for pair in factors]
    finally:
        switch.fp32_precision = before
    exact = left.double() @ right.double().t()
    bound = _ERROR_BOUND * left.double().norm(dim=1)[:, None] * right.double().norm(dim=1)
    return all(
        bool(((product - exact[: len(product), : product.shape[1]]).abs() <= bound[: len(product), : product.shape[1]]).all())
        for product in products
    )


def _switch() -> _Switch | None:
    """What oneDNN may do with float32, or ``None`` where this torch has no such switch."""
    matmul: _Switch | None = getattr(torch.backends.mkldnn, "matmul", None)
    return matmul if torch.backends.mkldnn.is_available() and hasattr(matmul, "fp32_precision") else None
