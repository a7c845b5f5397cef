"""Bar 4: the weights on eight known keys against the forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from _timing import Bar, best_times, exit_with, make_call

from sinklab.attention.columns import known_key_weights


@torch.no_grad()
def measure() -> list[Bar]:
    bars = []
    keys = torch.arange(8)
    for length in (2048, 4096):
        call = make_call(length, torch.float32)
        times = best_times(
            {
                "forward": lambda c=call: F.scaled_dot_product_attention(c.queries, c.keys, c.values, is_causal=True),
                "known": lambda c=call: known_key_weights(c, c.log_sum_exp, keys),
            },
            15,
        )
        bars.append(
            Bar("4", f"weights on 8 keys ÷ forward (float32, T = {length})", times["known"] / times["forward"], "<=", 0.03)
        )
    return bars


if __name__ == "__main__":
    exit_with(measure)
