"""Bars 1 to 3: column statistics against the forward alone and the eager matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from _timing import Bar, best_times, exit_with, make_call, peak_extra_memory

from sinklab.attention.call import AttentionCall
from sinklab.attention.statistics.columns import LogSumExpCapture, column_statistics

LENGTH = 4096
NEEDS = frozenset({"columns", "entropy", "maximum"})


def forward(call: AttentionCall) -> torch.Tensor:
    return F.scaled_dot_product_attention(call.queries, call.keys, call.values, is_causal=True)


def forward_with_statistics(call: AttentionCall) -> tuple[torch.Tensor, ...]:
    with LogSumExpCapture() as captured:
        output = forward(call)
    call.log_sum_exp = captured.log_sum_exp
    statistics = column_statistics(call, NEEDS)
    assert statistics.column_sum is not None
    assert statistics.column_count is not None
    return output, statistics.column_sum / statistics.column_count, statistics.row_entropy, statistics.row_max


def eager_with_statistics(call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """What ``output_attentions=True`` computes, and the statistics of the matrix it returns."""
    length = call.q_len
    mask = torch.full((length, length), torch.finfo(call.queries.dtype).min, dtype=call.queries.dtype).triu(1)
    scores = torch.matmul(call.queries, call.keys.transpose(2, 3)) * call.scaling + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(call.queries.dtype)
    output = torch.matmul(weights, call.values)
    mean = weights.sum(dim=2, dtype=torch.float32) / torch.arange(length, 0, -1)
    entropy = torch.special.entr(weights).sum(dim=-1, dtype=torch.float32)
    return output, mean, entropy, weights.amax(dim=-1)


@torch.no_grad()
def measure() -> list[Bar]:
    bars = []
    for dtype in (torch.float32, torch.bfloat16):
        name = f"{str(dtype).removeprefix('torch.')}, T = {LENGTH}, 8 heads of 64"
        call = make_call(LENGTH, dtype)
        times = best_times({"forward": lambda c=call: forward(c), "ours": lambda c=call: forward_with_statistics(c)}, 15)
        eager = best_times(
            {"eager": lambda c=call: eager_with_statistics(c), "ours": lambda c=call: forward_with_statistics(c)}, 3
        )
        ours, theirs = (peak_extra_memory(lambda c=call, f=f: f(c)) for f in (forward_with_statistics, eager_with_statistics))
        bars += [
            Bar("1", f"forward + statistics ÷ forward ({name})", times["ours"] / times["forward"], "<=", 1.6),
            Bar("1", f"extra memory ({name})", ours, "<=", 64, "MiB"),
            Bar("2", f"eager matrix + statistics ÷ ours ({name})", eager["eager"] / eager["ours"], ">=", 3.5),
            Bar("2", f"extra memory ÷ eager's ({name})", ours / theirs, "<=", 0.05),
        ]
    for length in (2048, LENGTH):
        call = make_call(length, torch.float32)
        times = best_times(
            {"forward": lambda c=call: forward(c), "ours": lambda c=call: column_statistics(c)}, 40 if length < LENGTH else 9
        )
        bars += [Bar("3", f"column sums ÷ forward (float32, T = {length})", times["ours"] / times["forward"], "<=", 0.45)]
    return bars


if __name__ == "__main__":
    exit_with(measure)
