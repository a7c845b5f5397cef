"""The function that two operations share: ``elu`` has it of scores, ``elu_kernel`` of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def elu_plus_one(numbers: Tensor) -> Tensor:
    """``elu(x) + 1`` without adding 1 to what is close to -1: small numbers keep their digits and stay positive.

    The slope at 0 is 1, from either side; that of ``clamp`` there is 0 since torch 2.14.
    """
    return torch.where(numbers < 0, torch.exp(torch.where(numbers < 0, numbers, 0.0)), numbers + 1.0)
