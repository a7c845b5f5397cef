"""Feature kernels in chunks, forward and backward, against their own quadratic form and against SDPA."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _timing import Bar, best_times, exit_with, peak_extra_memory

from sinklab.attention.operation import Inputs
from sinklab.attention.paths.table import compute
from sinklab.operations.elu_kernel import EluKernel

HEADS, HEAD_DIM = 8, 64


def measure() -> list[Bar]:
    what = "elu_kernel, forward and backward (float32, T = {})"
    bars = []
    for length, limit in ((256, 1.0), (2048, 0.1)):
        times = best_times({path: attention(length, path) for path in ("linear", "plain")}, 5)
        bars.append(Bar("linear", f"{what.format(length)} ÷ its quadratic form", times["linear"] / times["plain"], "<=", limit))
    times = best_times({path: attention(4096, path) for path in ("linear", "sdpa")}, 5)
    bars.append(Bar("linear", f"{what.format(4096)} ÷ SDPA", times["linear"] / times["sdpa"], "<=", 0.25))
    short, long = (peak_extra_memory(attention(length, "linear")) for length in (4096, 16384))
    bars.append(Bar("linear", f"memory of {what.format(16384)} ÷ that of T = 4096", long / short, "<=", 4.4))
    return bars


def attention(length: int, path: str) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator).requires_grad_() for _ in range(3)]
    queries, keys, values = leaves
    inputs = Inputs(queries=queries, keys=keys, values=values, visible=None, causal=True, scaling=HEAD_DIM**-0.5)

    def run() -> object:
        if path == "sdpa":
            outputs = F.scaled_dot_product_attention(*leaves, is_causal=True)
        else:
            outputs, _ = compute(EluKernel(), inputs, path)
        return torch.autograd.grad(outputs, leaves, torch.ones_like(outputs))

    return run


if __name__ == "__main__":
    exit_with(measure)
