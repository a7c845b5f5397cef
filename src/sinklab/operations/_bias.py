"""What the learned biases share: how their vectors start, and the score of a key that is not in the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_STD = 0.02
"""Standard deviation of learned keys and values at the start, as released by Gu et al. 2024 (arXiv 2410.10781)."""


NO_SCORE = -1e4
"""Null score of a head that has none: the null mass is exactly 0 beside the score of any real key; a number of every dtype."""


def bias_scores(queries: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Score ``queries · key · scaling`` of a bias key, ``(batch, num_heads, q_len)``, in float32 or wider.

    Args:
        queries: ``(batch, num_heads, q_len, size)``.
        key: ``(num_heads or 1, size)``.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    # A product and a sum, which autocast leaves in float32: the kernels keep the scores of real keys in float32 as well.
    return (queries.to(dtype) * key[:, None].to(dtype)).sum(dim=-1) * scaling
