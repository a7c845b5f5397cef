"""Registers at test time: tokens that a model of pictures was not trained with, and that take over what its spikes carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from sinklab.attention.anatomy import Anatomy, transformers_model
from sinklab.attention.modules import named_modules
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.positions import REGISTERS, grid_of

__all__ = ["Registers", "add_registers", "require_pictures"]


class Registers:
    """Tokens that were added to a model; see :func:`add_registers`.

    Attributes:
        number: of added tokens.
        front: tokens before the added ones (class token and registers of the model's own), known from the first forward on.
    """

    def __init__(self, model: PreTrainedModel, neurons: Mapping[str, Sequence[int]], number: int) -> None:
        self.model, self.number, self.front = model, number, 0
        self._grid: tuple[int, int] | None = None
        modules = dict(named_modules(model))
        anatomy = Anatomy(model)
        layers = list(anatomy.layers.values())
        # A model within the model may be called by itself.
        handles = self._handles = [part.register_forward_pre_hook(self._begin, with_kwargs=True) for part in anatomy.models]
        handles.append(layers[0].register_forward_pre_hook(self._insert, with_kwargs=True))
        for name, units in neurons.items():
            handles.append(modules[name].register_forward_pre_hook(self._moving(torch.tensor(units, dtype=torch.int64))))
        handles.append(layers[-1].register_forward_hook(self._cut))
        setattr(model, REGISTERS, getattr(model, REGISTERS, 0) + number)  # so that positions have their names

    def remove(self) -> None:
        """The model is as it was before; a second time nothing happens."""
        handles: list[RemovableHandle] = self._handles
        if handles:
            setattr(self.model, REGISTERS, getattr(self.model, REGISTERS) - self.number)
        while handles:
            handles.pop().remove()

    def left_out(self, hidden: Tensor) -> Tensor:
        """Hidden states ``(batch, seq_len + number, width)`` of the model's own tokens, ``(batch, seq_len, width)``."""
        return torch.cat((hidden[:, : self.front], hidden[:, self.front + self.number :]), 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def _begin(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        pictures = kwargs.get("pixel_values", args[0] if args else None)
        if isinstance(pictures, Tensor) and pictures.ndim == 4:
            self._grid = grid_of(self.model, {"pixel_values": pictures})

    def _insert(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        hidden = args[0] if args else kwargs.get("hidden_states")
        patches = 0 if self._grid is None else self._grid[0] * self._grid[1]
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or not 0 < patches <= hidden.shape[1]:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives its first block no row of patches that its `patch_size` accounts for"
            )
        self.front = hidden.shape[1] - patches
        new = hidden.new_zeros(len(hidden), self.number, hidden.shape[2])
        longer = torch.cat((hidden[:, : self.front], new, hidden[:, self.front :]), 1)
        return ((longer, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": longer})

    def _moving(self, units: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            activations = args[0].clone()
            own = activations[..., units]
            largest = own.gather(1, own.abs().argmax(1, keepdim=True))
            own[:, self.front + self.number :] = 0.0
            own[:, self.front : self.front + self.number] = largest
            activations[..., units] = own
            return (activations, *args[1:])

        return hook

    def _cut(self, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        hidden = output[0] if isinstance(output, tuple) else output
        assert isinstance(hidden, Tensor)
        self._grid = None
        shorter = self.left_out(hidden)
        return (shorter, *output[1:]) if isinstance(output, tuple) else shorter


def add_registers(model: PreTrainedModel, neurons: Mapping[str, Sequence[int]], *, number: int = 1) -> Registers:
    """Add tokens to a model of pictures, and move to them what some neurons say at its patches.

    Models without registers write spikes at patches that say little, by a few neurons, and use them as sinks. Given a token
    that stands for no patch, with the activation of those neurons that is largest in size over all tokens of the picture, and 0
    in them at every patch, the model uses the token in the place of the patches (Jiang et al. 2025, arXiv 2506.08010). Nothing
    is trained, and no weight changes. ``sinklab origin --registers N`` finds the neurons and measures what it does.

    The tokens enter the first block as zeros, behind the class token and the model's own registers and before the patches, and
    are gone behind the last block: outputs have the shapes that they had. Attention and hidden states in between have them, and
    an audit of the model calls them ``register 0`` and so on.

    Args:
        model: reads ``pixel_values``, in blocks that keep all positions. Used in place, until ``remove()`` or the end of a
            ``with`` block.
        neurons: qualified name of a linear map at the end of an MLP, to the numbers of some of its inputs.
        number: of added tokens, 1 or more; each is given the same.

    Returns:
        What takes the tokens away again.

    Raises:
        InputError: no model of transformers.
        ConfigurationError: no token, no neuron, a module that is none, or a neuron that it has not.
        UnsupportedModelError: a model that reads no pictures, reads them in windows, or adds a bias for each pair of positions;
            while it runs, one whose first block is given something else than the patches behind a few tokens.
    """
    model = transformers_model(model)
    if number < 1:
        raise ConfigurationError(f"`number` {number} must be 1 or more: how many tokens are added")
    require_pictures(model)
    if not isinstance(neurons, Mapping):
        raise ConfigurationError(f"`neurons` is of {type(neurons).__name__}; expected numbers by names of linear maps")
    modules = dict(named_modules(model))
    if not any(len(units) for units in neurons.values()):
        raise ConfigurationError("name the neurons that are moved; `sinklab origin` finds those that write a spike")
    for name, units in neurons.items():
        weight = getattr(modules.get(name), "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise ConfigurationError(f"{type(model).__name__} has no linear map {name!r}, whose inputs are neurons")
        inputs = getattr(modules[name], "in_features", weight.shape[0])
        if wrong := [unit for unit in units if not 0 <= unit < inputs]:
            raise ConfigurationError(f"{name} has no neuron {wrong[0]}; expected 0 to {inputs - 1}")
    return Registers(model, neurons, number)


def require_pictures(model: PreTrainedModel) -> None:
    """Refuse models to which no token can be added before their patches."""
    name = type(model).__name__
    if model.main_input_name != "pixel_values":
        raise UnsupportedModelError(
            f"{name} reads no pictures, and registers are added to patches; for a text there is the intervention insert_bos"
        )
    tables = [parameter for parameter, _ in model.named_parameters() if "relative_position" in parameter]
    if getattr(model.config, "window_size", None) or tables:
        why = "adds a bias for each pair of positions" if tables else "reads pictures in windows"
        raise UnsupportedModelError(f"{name} {why}, in which an added token has no place")
    if not Anatomy(model).layers:
        raise UnsupportedModelError(
            f"{name} has no list of blocks with attention that goes through the attention interface of transformers"
        )
