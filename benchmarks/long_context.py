"""Bar 6: 32k tokens of one head on a CPU, exact in bounded memory, and estimated with an honest interval."""

from __future__ import annotations

import dataclasses

import torch
from _timing import Bar, best_times, exit_with, make_call, peak_extra_memory

from sinklab.attention.columns import column_statistics, estimate_columns

LENGTH = 32 * 1024
QUERIES = 1024
NEEDS = frozenset({"columns", "entropy", "maximum"})


@torch.no_grad()
def measure() -> list[Bar]:
    call = make_call(LENGTH, torch.float32, heads=1)
    # The first key attracts every query, as a sink does; the others are noise.
    keys = call.keys.clone()
    keys[:, :, 0] = 0.0
    keys[:, :, 0, 0] = 20.0
    queries = call.queries.clone()
    queries[..., 0] = 3.0
    call = dataclasses.replace(call, queries=queries, keys=keys, log_sum_exp=None)
    memory = peak_extra_memory(lambda: column_statistics(call, NEEDS))
    exact = column_statistics(call, NEEDS)
    assert exact.column_sum is not None
    assert exact.column_count is not None
    mean = exact.column_sum / exact.column_count
    # A column that a handful of queries see has no interval to speak of; the estimator says so itself (half width 1).
    shares = []
    for seed in range(3):
        estimate, half_width = estimate_columns(call, QUERIES, seed)
        shares.append(float(((estimate - mean).abs() <= half_width).double().mean()))
    times = best_times({"exact": lambda: column_statistics(call), "estimate": lambda: estimate_columns(call, QUERIES, 0)}, 2)
    return [
        Bar("6", f"extra memory, {LENGTH} tokens, one head", memory, "<=", 256, "MiB"),
        Bar("6", f"columns inside their 95 % interval, {QUERIES} queries", 100 * min(shares), ">=", 93, "%"),
        Bar("6", "estimate ÷ exact pass without a given LSE", times["estimate"] / times["exact"], "<=", 1.0),
    ]


if __name__ == "__main__":
    exit_with(measure)
