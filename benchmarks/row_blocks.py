"""Bars 8 and 9: operations that weigh whole rows, forward and backward, against plain SDPA and against their own plain form."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _timing import Bar, best_times, exit_with, peak_extra_memory

from sinklab.attention.operation import Inputs
from sinklab.attention.paths.table import compute
from sinklab.registry import operations

OPERATIONS = ("sigmoid", "relu", "elu", "softpick", "clipped_softmax")
HEADS, HEAD_DIM, LONG = 8, 64, 2048
DTYPES = ((torch.float32, 1.4), (torch.bfloat16, 0.75))


def measure() -> list[Bar]:
    bars = []
    for dtype, limit in DTYPES:
        runs = {"sdpa": attention("sdpa", LONG, dtype)}
        for name in OPERATIONS:
            runs[name] = attention(name, LONG, dtype, "blocks")
            runs[f"{name}, plain"] = attention(name, LONG, dtype, "plain")
        times = best_times(runs, 5)
        for name in OPERATIONS:
            what = f"{name}, forward and backward ({dtype}, T = {LONG})"
            bars.append(Bar("8", f"{what} ÷ SDPA", times[name] / times["sdpa"], "<=", limit))
            bars.append(Bar("8", f"plain form ÷ {what}", times[f"{name}, plain"] / times[name], ">=", 2.5))
    for name in OPERATIONS:
        ours, plain = (peak_extra_memory(attention(name, LONG, torch.float32, path)) for path in ("blocks", "plain"))
        bars.append(Bar("8", f"memory of {name} ÷ that of its plain form (float32, T = {LONG})", ours / plain, "<=", 0.05))
    for length, batch, limit in ((256, 16, 0.45), (2048, 1, 0.7), (4096, 1, 0.7)):
        runs = {name: attention(name, length, torch.bfloat16, "blocks", batch) for name in ("softmax", "sdpa")}
        times = best_times(runs, 9 if length < LONG else 5)
        what = f"softmax, forward and backward (bfloat16, {batch} × {length} tokens) ÷ SDPA"
        bars.append(Bar("9", what, times["softmax"] / times["sdpa"], "<=", limit))
    return bars


def attention(name: str, length: int, dtype: torch.dtype, path: str = "", batch: int = 1) -> Callable[[], object]:
    """Forward and backward of an operation along a path, or of the fused call; the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(batch, HEADS, length, HEAD_DIM, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    queries, keys, values = leaves
    inputs = Inputs(queries=queries, keys=keys, values=values, visible=None, causal=True, scaling=HEAD_DIM**-0.5)
    gradient = torch.ones_like(values)
    operation = None if name == "sdpa" else operations.make(name)

    def run() -> object:
        if operation is None:
            outputs = F.scaled_dot_product_attention(*leaves, is_causal=True)
        else:
            outputs, _ = compute(operation, inputs, path)
        return torch.autograd.grad(outputs, leaves, gradient)

    return run


if __name__ == "__main__":
    exit_with(measure)
