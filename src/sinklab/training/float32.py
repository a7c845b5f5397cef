"""Float32 on a CPU: the faster library of matrix products for a whole run, where it has proved to be a float32 product."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from sinklab.attention.matmul_precision import is_float32_product

__all__ = ["fast_float32"]

LARGEST = 512
"""Most rows and columns of a product that is checked: which kernel is chosen does not depend on more."""

_PERMISSION = "bf16"


@contextlib.contextmanager
def fast_float32(model: nn.Module, tokens: int) -> Iterator[bool]:
    """Let oneDNN take the float32 products of a ``with`` block over from MKL, if those of this model stay float32 with it.

    On AMD processors this is some 1.8 times faster. It needs the permission to round to bfloat16, of which a CPU without
    bfloat16 matrix units makes no use; on one that has them the products would lose digits, the check fails, and nothing
    changes. Forward and both backward products of every linear map are checked, up to :data:`LARGEST` rows.

    Args:
        tokens: of one forward pass.

    Yields:
        Whether the products were handed over.
    """
    shapes = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)}
    device = next(model.parameters()).device
    rows = min(tokens, LARGEST)
    products = {
        product
        for wide, narrow in shapes
        # inner, rows, columns of: outputs, gradient of the inputs, gradient of the weight
        for product in (
            (narrow, rows, min(wide, LARGEST)),
            (wide, rows, min(narrow, LARGEST)),
            (tokens, min(wide, LARGEST), min(narrow, LARGEST)),
        )
    }
    if device.type != "cpu" or not all(is_float32_product(_PERMISSION, *product) for product in sorted(products)):
        yield False
        return
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    setting.fp32_precision = _PERMISSION
    try:
        yield True
    finally:
        setting.fp32_precision = before
