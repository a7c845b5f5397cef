"""Quantized: a copy of a model with weights and activations on uniform integer grids, simulated in float32.

Post-training quantisation as in Bondarenko et al. 2023 (arXiv 2306.12929) and their release: weights symmetric, one range per
tensor from its largest absolute value; activations asymmetric, one static range per tensor from a running minimum and maximum
over calibration batches, quantised already while ranges are estimated. On a grid are

- the weights of every linear map but the head, and what every embedding table gives;
- the input and the output of every linear map but the head (so queries, keys and values, the head outputs behind attention,
  both sides of the feed-forward maps), and the input of the head;
- the residual stream where it enters the first layer and leaves each layer, and what enters every norm.

In float stay the head, biases, norms, learned tokens in front, parameters of attention operations and positions, and what lies
inside the attention function: scores and weights, which the release quantises too. A residual sum inside a layer is quantised
for the norm that reads it and not where it is carried on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.modules import linear_map, named_modules
from sinklab.errors import UnsupportedModelError
from sinklab.models.block import Norm
from sinklab.models.integer_linear import Grid, RunningGrid, symmetric_grid
from sinklab.operations._sigma_linear import SigmaLinear

MOMENTUM = 0.9
"""Of the running minimum and maximum."""


@torch.no_grad()
def quantized(
    model: PreTrainedModel, calibration: Iterable[Tensor], *, weight_bits: int = 8, activation_bits: int = 8
) -> PreTrainedModel:
    """A quantised copy; the model stays as it is.

    Args:
        model: float32, in evaluation mode.
        calibration: batches of rows, int64 ``(rows, seq_len)``, on the model's device; at least one.
        weight_bits, activation_bits: from 2 to 16; float32, in which grids are simulated, holds no finer.

    Raises:
        UnsupportedModelError: a model without a head, or with a linear map that is neither plain nor one of ours.
    """
    twin = copy.deepcopy(model).eval()
    grids = _lay_grids(twin, weight_bits, activation_bits)
    for rows in calibration:
        twin(input_ids=rows, use_cache=False)
    for grid in grids:
        grid.observing = False
    return twin


def weight_grid(weights: Tensor, bits: int) -> Grid:
    """The symmetric grid of a tensor: ``2^bits - 1`` values around 0, the outer ones at its largest absolute value."""
    return symmetric_grid(weights.detach().abs().max(), bits)


def activation_grid(bits: int) -> RunningGrid:
    """An asymmetric grid of ``2^bits`` values, of which 0 is one; its range follows what it is shown until observing ends."""
    return RunningGrid(bits, MOMENTUM)


def _lay_grids(model: PreTrainedModel, weight_bits: int, activation_bits: int) -> list[RunningGrid]:
    """Put the weights on grids and hooks on all places of activations; the grids of the activations."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no head (get_output_embeddings() is None), so it has no loss")
    _unfold_sigma(model)
    grids: list[RunningGrid] = []

    def grid() -> RunningGrid:
        grids.append(activation_grid(activation_bits))
        return grids[-1]

    for name, module in named_modules(model):
        if module is head or isinstance(module, Norm) or "norm" in type(module).__name__.lower():
            module.register_forward_pre_hook(_on_input(grid()), with_kwargs=True)
        elif isinstance(module, (nn.Linear, Conv1D)) and type(module) in (nn.Linear, Conv1D):
            module.weight.copy_(weight_grid(module.weight, weight_bits)(module.weight))
            module.register_forward_pre_hook(_on_input(grid()), with_kwargs=True)
            module.register_forward_hook(_on_output(grid()))
        elif linear_map(module) is not None:
            raise UnsupportedModelError(
                f"{name} is a {type(module).__name__}, not a plain nn.Linear; load the model without quantisation and adapters"
            )
        elif isinstance(module, nn.Embedding):
            # The output and not the table, which the head may share.
            module.register_forward_hook(_on_output(weight_grid(module.weight, weight_bits)))
    layers = list(Anatomy(model).layers.values())
    layers[0].register_forward_pre_hook(_on_input(grid()), with_kwargs=True)
    for layer in layers:
        layer.register_forward_hook(_on_output(grid()))
    return grids


def _unfold_sigma(model: nn.Module) -> None:
    """Make maps with a learned spectral norm plain ones, as one would before shipping them."""
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, name, child in children:
        if isinstance(child, SigmaLinear):
            plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device=child.weight.device)
            plain.weight = nn.Parameter(child.effective_weight(), requires_grad=False)
            plain.bias = child.bias
            setattr(parent, name, plain)


def _on_input(grid: Grid | RunningGrid) -> Callable[..., object]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> object:
        if args:
            return (grid(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": grid(kwargs["hidden_states"])}

    return hook


def _on_output(grid: Grid | RunningGrid) -> Callable[..., object]:
    def hook(module: nn.Module, args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> object:
        return (grid(output[0]), *output[1:]) if isinstance(output, tuple) else grid(output)

    return hook
