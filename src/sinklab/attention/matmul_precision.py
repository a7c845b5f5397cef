"""Which float32 matrix product the CPU uses: the fastest one that has proved, on this machine, to be a float32 product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["float32_product", "is_float32_product"]

_ERROR_BOUND = 4e-6
"""On |product − exact| / (|row| · |column|), for random factors. Float32 products of 65 to 257 terms stay near 3e-7; factors
rounded to TF32 (2⁻¹²) or bfloat16 (2⁻⁹) exceed it a hundredfold in the worst of the many thousand entries that are compared."""


def float32_product(inner: int, rows: int, columns: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A function ``product(left, right, out)`` that multiplies matrices in float32 accuracy, by the fastest safe library.

    The permission to compute in bfloat16 makes oneDNN take over from MKL. On a CPU without bfloat16 matrix units it does not
    use the permission and runs its AVX-512 float32 kernel, twice as fast as MKL on AMD processors; on a CPU that has them it
    would round. So the permission is given only where products of these very shapes have been compared with float64, and
    otherwise taken away, whatever the process has set. It is set for the duration of each product and restored at once:
    vector products elsewhere are slower under it.

    Args:
        inner: length of the rows that are multiplied.
        rows, columns: size of the largest product.
    """
    setting = _setting()
    if setting is None:
        return _plain_product
    precision = "bf16" if is_float32_product("bf16", inner, rows, columns) else "ieee"

    def product(left: Tensor, right: Tensor, out: Tensor) -> None:
        before = setting.fp32_precision
        setting.fp32_precision = precision
        try:
            torch.mm(left, right, out=out)
        finally:
            setting.fp32_precision = before

    return product


def _plain_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    torch.mm(left, right, out=out)


@functools.cache
def is_float32_product(precision: str, inner: int, rows: int, columns: int) -> bool:
    """Whether products under a setting of ``torch.backends.mkldnn.matmul.fp32_precision`` have float32 accuracy.

    Checked once per process and shape, on the full tile and on a ragged one, alone and in a batch, because the kernel is chosen
    by shape.
    """
    setting = _setting()
    if setting is None:
        return False
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator)
    right = torch.randn(columns, inner, generator=generator)
    before = setting.fp32_precision
    setting.fp32_precision = precision
    try:
        factors = [(left[:r], right[:c].t()) for r, c in ((rows, columns), (rows - rows // 3, columns // 3 + 1))]
        products = [torch.mm(*pair) for pair in factors]
        products += [torch.bmm(*(factor.expand(2, -1, -1) for factor in pair))[1] for pair in factors]
    finally:
        setting.fp32_precision = before
    exact = left.double() @ right.double().t()
    size = left.double().norm(dim=1)[:, None] * right.double().norm(dim=1)
    errors = [
        ((product - exact[: len(product), : product.shape[1]]) / size[: len(product), : product.shape[1]]).abs()
        for product in products
    ]
    return all(bool((error <= _ERROR_BOUND).all()) for error in errors)


def _setting() -> Any:
    """The switch of oneDNN, or ``None`` where this torch has none."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return matmul if torch.backends.mkldnn.is_available() and hasattr(matmul, "fp32_precision") else None
