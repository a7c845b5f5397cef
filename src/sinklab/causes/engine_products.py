"""Products with weight matrices in full float32 precision, by the faster of the libraries that torch carries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["fast_products", "linear", "replaced"]


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``inputs @ weight.T + bias`` in the dtype of the inputs.

    On a CPU torch hands float32 products to MKL, which uses half of the vector width on processors of other makers; oneDNN,
    which torch also carries, does not. Both round to float32 and to nothing less.
    """
    if _suits(inputs) and _suits(weight):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
        return result
    return nn.functional.linear(inputs, weight, bias)


@contextlib.contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Let the plain linear maps of a float32 model on a CPU go through :func:`linear` until the block ends."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if type(module) is nn.Linear and _suits(module.weight):
                stack.enter_context(replaced(module, _forward_of(module)))
        yield


@contextlib.contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module, and no other of its class, another ``forward`` until the block ends; its hooks still run."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward  # the method of the class shows again
        else:
            module.forward = before


def _forward_of(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda inputs: linear(inputs, module.weight, module.bias)


def _suits(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and tensor.layout == torch.strided
        and tensor.ndim > 1
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
