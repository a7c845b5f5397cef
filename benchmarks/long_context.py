"""Bar 6: 32k tokens of one head on a CPU, exact in bounded memory."""

from __future__ import annotations

import dataclasses

import torch
from _timing import Bar, exit_with, make_call, peak_extra_memory

from sinklab.attention.statistics.columns import column_statistics

LENGTH = 32 * 1024
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
    return [Bar("6", f"extra memory, {LENGTH} tokens, one head", memory, "<=", 256, "MiB")]


if __name__ == "__main__":
    exit_with(measure)
