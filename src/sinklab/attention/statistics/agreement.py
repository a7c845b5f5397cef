"""Whether a kernel of the device gives the numbers of the plain reference: tried before any number of it is believed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.statistics.blocked import blocked_statistics
from sinklab.attention.visibility import Causal, Everything
from sinklab.registry import operations

__all__ = ["agrees"]

TOKENS, BUCKETS = 200, 8
"""Of the trial: no multiple of a tile, and buckets that end inside one."""


def agrees(
    compute: Callable[[AttentionCall, int], Statistics], device: torch.device, dtype: torch.dtype, head_dim: int, bound: float
) -> bool:
    """Whether column sums and a bucket map are those of the blocked reference.

    Tried on 2 × 4 heads (2 key-value heads) of 200 tokens, causal and full. One that refuses the shapes (RuntimeError) has not
    agreed.

    Args:
        compute: statistics of a call that has its log-sum-exp, with a map of so many buckets.
        bound: largest relative error of a sum of a hundredth or more; below that of the hundredth.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, heads, TOKENS, head_dim, generator=generator) for heads in (4, 2)]
    queries, keys = (tensor.to(device=device, dtype=dtype) for tensor in drawn)
    positions = torch.arange(TOKENS, device=device).expand(2, -1)
    for visible in (Causal(0, device), Everything(device)):
        call = AttentionCall(
            site=Site("self-check", 0),
            queries=queries,
            keys=keys,
            values=keys,
            scaling=head_dim**-0.5,
            visible=visible,
            operation=operations.make("softmax"),
            query_positions=positions,
            key_positions=positions,
            query_documents=torch.zeros_like(positions),
            key_documents=torch.zeros_like(positions),
        )
        reference = blocked_statistics(call, frozenset({"columns", "log_sum_exp"}), BUCKETS)
        call.log_sum_exp = reference.log_sum_exp
        try:
            result = compute(call, BUCKETS)
        except RuntimeError:
            return False
        for got, expected in ((result.column_sum, reference.column_sum), (result.buckets, reference.buckets)):
            assert got is not None
            assert expected is not None
            if not bool(((got - expected).abs() <= bound * expected.clamp(min=1e-2)).all()):
                return False
    return True
