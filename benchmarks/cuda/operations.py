"""Operations, forward and backward, against the fused softmax: null terms on the flash path, others by FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _bench import Bench
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sinklab.attention.operation import HeadShape, Inputs, Operation
from sinklab.attention.paths.table import choose, compute
from sinklab.registry import operations

NULL = ("sink_logit", "softmax_plus_one", "key_bias", "key_value_bias")
FLEX = ("sigmoid", "relu", "softpick", "elu", "clipped_softmax")
BATCH, HEADS = 2, 16

Run = Callable[[], tuple[Tensor, ...]]
"""Outputs, then gradients of the leaves."""


def null_terms(bench: Bench) -> None:
    """A null term on the flash path."""
    length = 128 if bench.quick else 4096
    bench.turn()
    with bench.attempt("errors of null terms"):
        for name in NULL:
            found = attention(bench, name, 512, 64, "flash", batch=1, heads=4)()
            expected = attention(bench, name, 512, 64, "plain", batch=1, heads=4, exact=True)()
            worst = max(distance(one, two) for one, two in zip(found, expected, strict=True))
            what = f"{name}, largest relative error of outputs and gradients (bfloat16, T = 512)"
            bench.bar("16", what, worst, "<=", 2e-2, "")
    for size in (64, 128):
        label = f"bfloat16, {BATCH} × {length:,} tokens, {HEADS} heads of {size}"
        with bench.attempt(f"null terms ({label})"):
            runs = {"default": fused(bench, length, size), **backends(bench, length, size)}
            runs |= {name: attention(bench, name, length, size, "flash") for name in NULL}
            runs["softmax"] = attention(bench, "softmax", length, size, "flash")
            times = bench.times({name: lambda number, run=run: run() for name, run in runs.items()}, 1.5)
            against = "flash" if "flash" in times else "default"
            for name in (*NULL, "softmax"):
                what = f"{name}, forward and backward ÷ SDPA, {against} ({label})"
                bench.bar("16", what, times[name] / times[against], "<=", 1.1, ms=times, auto=chosen(bench, name, length, size))
            best = min((name for name in runs if name not in (*NULL, "softmax")), key=lambda name: times[name])
            bench.figure(
                "16", f"sink_logit, forward and backward ÷ best SDPA, {best} ({label})", times["sink_logit"] / times[best]
            )


def through_flex(name: str, bench: Bench) -> None:
    """One operation along the path that serves it on a GPU: FlexAttention, or the plain one where φ has no logarithm."""
    given = type(operations.make(name)).log_similarity is not Operation.log_similarity
    length, path = (4096 if bench.cuda else 128), "flex" if bench.cuda and given else "plain"
    # Shapes are compiled as they are, so that both head sizes can be timed in turn; several lengths have a part of their own.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        ours = {}
        for size in (64, 128):
            with bench.attempt(f"{name}, heads of {size}, first call"):
                run = attention(bench, name, length, size, path)
                run()
                ours[size] = run
        bench.turn()
        for size, run in ours.items():
            label = f"bfloat16, {BATCH} × {length:,} tokens, {HEADS} heads of {size}"
            with bench.attempt(f"{name} ({label})"):
                worst = error(bench, name, run, length, size)
                what = f"{name}, largest relative error of outputs and gradients ({label})"
                bench.bar("8", what, worst, "<=", 2e-2, "", auto=chosen(bench, name, length, size))
                runs = {"default": fused(bench, length, size), **backends(bench, length, size), name: run}
                times = bench.times({key: lambda number, run=given: run() for key, given in runs.items()}, 0.7)
                against = "flash" if "flash" in times else "default"
                what = f"{name}, forward and backward ÷ SDPA, {against} ({label})"
                bench.bar("8", what, times[name] / times[against], "<=", 2.5, ms=times)
        label = f"bfloat16, {BATCH} × {length:,} tokens, {HEADS} heads of 64"
        with bench.attempt(f"{name}, plain form ({label})"):
            plain, run = attention(bench, name, length, 64, "plain"), ours[64]
            times = bench.times({"plain": lambda number: plain(), "ours": lambda number: run()}, 0.7)
            bench.bar(
                "8", f"plain form ÷ {name}, forward and backward ({label})", times["plain"] / times["ours"], ">=", 2.5, ms=times
            )
            used, theirs = bench.peak(run), bench.peak(plain)
            bench.bar(
                "8", f"memory of {name} ÷ that of its plain form ({label})", used / theirs, "<=", 0.05, mib=[used, theirs]
            )


def lengths(bench: Bench) -> None:
    """FlexAttention under several lengths in one process, as torch compiles by default: does it serve, and is it right?"""
    found = {}
    path = "flex" if bench.cuda else "plain"
    for length in (128, 256, 384, 1024)[: 2 if bench.quick else 4]:
        with bench.attempt(f"sigmoid at a further length, {length}"):
            run = attention(bench, "sigmoid", length, 64, path)
            run()
            found[length] = run
    with bench.attempt("a further operation in the same process"):
        attention(bench, "relu", 640, 64, path)()
    bench.turn()
    for length, run in found.items():
        what = f"sigmoid, one process, several lengths: largest relative error (bfloat16, T = {length})"
        with bench.attempt(what):
            bench.bar("8", what, error(bench, "sigmoid", run, length, 64), "<=", 2e-2, "")


# --- calls ------------------------------------------------------------------------------------------------------------------


def leaves_of(bench: Bench, length: int, size: int, batch: int = BATCH, heads: int = HEADS) -> list[Tensor]:
    """Queries, keys and values, the same numbers for the same shape, and the gradient of the outputs."""
    return [bench.randn(batch, heads, length, size, seed=seed) for seed in range(4)]


def inputs_of(queries: Tensor, keys: Tensor, values: Tensor, state: dict[str, Tensor]) -> Inputs:
    return Inputs(
        queries=queries, keys=keys, values=values, visible=None, causal=True, scaling=queries.shape[3] ** -0.5, state=state
    )


def state_of(bench: Bench, name: str, heads: int, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters, drawn once."""
    torch.manual_seed(0)
    parameters = operations.make(name).parameters(HeadShape(heads, heads, size, size, heads * size))
    state = {key: (value + 0.1 * torch.randn(value.shape)).bfloat16() for key, value in parameters.items()}
    return {key: value.to(bench.device, dtype).requires_grad_() for key, value in state.items()}


def attention(
    bench: Bench, name: str, length: int, size: int, path: str, *, batch: int = BATCH, heads: int = HEADS, exact: bool = False
) -> Run:
    """Forward and backward of an operation along a path, of numbers of bfloat16; in float64 if ``exact``."""
    operation, dtype = operations.make(name), torch.float64 if exact else torch.bfloat16
    *drawn, gradient = (tensor.to(dtype) for tensor in leaves_of(bench, length, size, batch, heads))
    state = state_of(bench, name, heads, size, dtype)
    leaves = [*(tensor.requires_grad_() for tensor in drawn), *state.values()]
    inputs = inputs_of(*leaves[:3], state)

    def run() -> tuple[Tensor, ...]:
        outputs, _ = compute(operation, inputs, path)
        return outputs.detach(), *torch.autograd.grad(outputs, leaves, gradient)

    return run


def fused(bench: Bench, length: int, size: int, backend: SDPBackend | None = None) -> Run:
    """Forward and backward of the stock attention, with the kernel of torch's choice or one by name."""
    *leaves, gradient = leaves_of(bench, length, size)
    for leaf in leaves:
        leaf.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        if backend is None:
            outputs = F.scaled_dot_product_attention(*leaves, is_causal=True)
        else:
            with sdpa_kernel(backend):
                outputs = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return outputs.detach(), *torch.autograd.grad(outputs, leaves, gradient)

    return run


def backends(bench: Bench, length: int, size: int) -> dict[str, Run]:
    """The stock attention with each kernel that serves it."""
    found = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        run = fused(bench, length, size, backend)
        try:
            run()
        except RuntimeError:
            continue
        found[name] = run
    return found


def chosen(bench: Bench, name: str, length: int, size: int) -> str:
    """The path that ``auto`` takes."""
    *leaves, _ = leaves_of(bench, length, size)
    for leaf in leaves:
        leaf.requires_grad_()
    return choose(operations.make(name), inputs_of(*leaves, state_of(bench, name, HEADS, size, torch.bfloat16)))


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm; not a number counts as infinite."""
    value = float((found.double() - expected.double()).norm() / expected.double().norm())
    return value if value == value else float("inf")


def error(bench: Bench, name: str, run: Run, length: int, size: int) -> float:
    """Largest relative error of outputs and gradients against float64, of a few heads of the very call that is timed."""
    found, operation = run(), operations.make(name)
    *drawn, gradient = leaves_of(bench, length, size)
    worst = 0.0
    for sample, head in ((0, 0), (1, 7), (1, 15)):
        place = (slice(sample, sample + 1), slice(head, head + 1))
        leaves = [tensor[place].double().requires_grad_() for tensor in drawn]
        outputs, _ = compute(operation, inputs_of(*leaves, {}), "plain")
        expected = (outputs, *torch.autograd.grad(outputs, leaves, gradient[place].double()))
        worst = max(worst, *(distance(one[place], two) for one, two in zip(found, expected, strict=False)))
    return worst


PARTS: dict[str, Callable[[Bench], None]] = {"null": null_terms}
PARTS |= {name: functools.partial(through_flex, name) for name in FLEX}
PARTS["lengths"] = lengths
