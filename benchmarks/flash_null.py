"""Bar 7: operations with a null term, forward and backward, against plain SDPA and against a softmax over one more column."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _timing import Bar, best_times, exit_with
from torch import Tensor

from sinklab.attention.operation import HeadShape, Inputs, Operation
from sinklab.attention.paths.table import compute
from sinklab.registry import operations

OPERATIONS = ("softmax_plus_one", "sink_logit", "key_bias", "key_value_bias")
HEADS, HEAD_DIM = 8, 64


def measure() -> list[Bar]:
    bars = []
    for length, rounds in ((1024, 9), (2048, 5)):
        runs = {"sdpa": fused(length)}
        for name in OPERATIONS:
            runs[name] = gradients(name, length, torch.float32, flash)
            runs[f"{name}, one more column"] = gradients(name, length, torch.float32, one_more_column)
        times = best_times(runs, rounds)
        for name in OPERATIONS:
            what = f"{name}, forward and backward (float32, T = {length})"
            slower = times[f"{name}, one more column"] / times[name]
            bars.append(Bar("7", f"{what} ÷ SDPA", times[name] / times["sdpa"], "<=", 1.12))
            bars.append(Bar("7", f"softmax over one more column ÷ {what}", slower, ">=", 3.0))
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        worst = max(gradient_error(name, dtype) for name in OPERATIONS)
        bars.append(Bar("7", f"largest relative error of a gradient ({dtype}, T = 1024)", worst, "<=", limit, ""))
    return bars


def tensors(length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def fused(length: int) -> Callable[[], object]:
    leaves = tensors(length, torch.float32)

    def run() -> object:
        outputs = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return torch.autograd.grad(outputs, leaves, torch.ones_like(outputs))

    return run


def gradients(
    name: str, length: int, dtype: torch.dtype, way: Callable[[Operation, Inputs], Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of an operation; the gradients of queries, keys, values and parameters."""
    torch.manual_seed(0)
    operation = operations.make(name)
    shape = HeadShape(HEADS, HEADS, HEAD_DIM, HEAD_DIM, HEADS * HEAD_DIM)
    state = {key: value.to(dtype).requires_grad_() for key, value in operation.parameters(shape).items()}
    queries, keys, values = tensors(length, dtype)
    inputs = Inputs(queries=queries, keys=keys, values=values, visible=None, causal=True, scaling=HEAD_DIM**-0.5, state=state)
    leaves = [queries, keys, values, *state.values()]

    def run() -> tuple[Tensor, ...]:
        outputs = way(operation, inputs)
        return torch.autograd.grad(outputs, leaves, torch.ones_like(outputs))

    return run


def flash(operation: Operation, inputs: Inputs) -> Tensor:
    return compute(operation, inputs, "flash")[0]


def plain(operation: Operation, inputs: Inputs) -> Tensor:
    return compute(operation, inputs, "plain")[0]


def one_more_column(operation: Operation, inputs: Inputs) -> Tensor:
    """What model code does: nothing is one more column of the scores, dropped after the softmax."""
    scores = inputs.queries @ inputs.keys.mT * inputs.scaling
    scores = scores.masked_fill(~inputs.mask(), float("-inf"))
    nothing = operation.null_scores(inputs.queries, inputs.scaling, inputs.state)
    column = nothing.to(scores.dtype).expand(scores.shape[:3])[..., None]
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)
    return operation.finish(weights[..., :-1] @ inputs.values, weights[..., -1], inputs.state)


def gradient_error(name: str, dtype: torch.dtype) -> float:
    found = gradients(name, 1024, dtype, flash)()
    expected = gradients(name, 1024, torch.float64, plain)()
    return max(float((one.double() - two).norm() / two.norm()) for one, two in zip(found, expected, strict=True))


if __name__ == "__main__":
    exit_with(measure)
