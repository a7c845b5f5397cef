"""Tap: the writes of a model as it runs, shown one by one and open to edits."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.attention.names import named_modules
from sinklab.studies.origin.structure import Structure, Sublayer, hooked, is_experts

__all__ = ["Tap"]


class Tap:
    """What is shown of every forward of a model; override what is needed. Hidden states are ``(batch, length, width)``."""

    def begin(self) -> None:
        """A forward begins."""

    def enter(self, block: int, hidden: Tensor) -> None:
        """What enters a block."""

    def activations(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        """What is given to the linear map of a sublayer, ``(batch, length, units)``; other values if they are to be others."""

    def routed(self, sublayer: Sublayer, arguments: tuple[Tensor, Tensor, Tensor], output: Tensor) -> Tensor | None:
        """What the experts of a sublayer are given (tokens, chosen experts, their weights) and what they return."""

    def write(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        """A write; other values if they are to be others."""

    def normed(self, sublayer: Sublayer, values: Tensor) -> None:
        """What the norm behind a write makes of the sum, where there is one (post-norm)."""

    def leave(self, block: int, hidden: Tensor) -> Tensor | None:
        """What leaves a block; other values if they are to be others."""

    @contextmanager
    def on(self, model: nn.Module, structure: Structure) -> Iterator[None]:
        """Be shown the forwards of a model until the ``with`` block ends."""
        with hooked(functools.partial(_Forward(self, structure).register, model)):
            yield


class _Forward:
    """Where a forward is, block by block and module by module; its methods are the hooks that show it to a tap."""

    def __init__(self, tap: Tap, structure: Structure) -> None:
        self._tap, self._structure = tap, structure
        sublayers = structure.sublayers
        self._split = [sublayer for sublayer in sublayers if sublayer.kind != "block"]
        self._blocks = {(block.module, block.call): block for block in structure.blocks}
        self._sources = {(sublayer.block, sublayer.source, sublayer.turn): sublayer for sublayer in self._split}
        self._writers = {(sublayer.block, sublayer.writer): sublayer for sublayer in sublayers if sublayer.writer}
        self._norms = {(sublayer.block, sublayer.norm): sublayer for sublayer in sublayers if sublayer.norm}
        self._calls, self._turns = Counter[str](), Counter[str]()  # of modules: in the forward, and in the block at hand
        self._inside: list[int] = []

    def register(self, model: nn.Module, handles: list[RemovableHandle]) -> None:
        """Add the hooks to a model."""
        modules = dict(named_modules(model))
        blocks = dict.fromkeys(block.module for block in self._structure.blocks)
        sublayers = self._structure.sublayers
        handles.append(model.register_forward_pre_hook(self._begin))
        for name in blocks:
            handles.append(modules[name].register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True))
        for name in dict.fromkeys(sublayer.writer for sublayer in sublayers if sublayer.writer is not None):
            if is_experts(modules[name]):
                handles.append(modules[name].register_forward_hook(functools.partial(self._experts, name), with_kwargs=True))
            else:
                handles.append(modules[name].register_forward_pre_hook(functools.partial(self._writer, name)))
        for name in dict.fromkeys(sublayer.source for sublayer in self._split):
            handles.append(modules[name].register_forward_hook(functools.partial(self._source, name)))
        for name in dict.fromkeys(sublayer.norm for sublayer in sublayers if sublayer.norm is not None):
            handles.append(modules[name].register_forward_hook(functools.partial(self._norm, name)))
        for name in blocks:
            handles.append(modules[name].register_forward_hook(self._leave))

    def _begin(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self._calls.clear()
        self._inside.clear()
        self._tap.begin()

    def _enter(self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        block = self._blocks.get((name, self._calls[name]))
        self._calls[name] += 1
        if block is not None:
            self._turns.clear()
            self._inside.append(block.number)
            hidden = args[0] if args else kwargs.get("hidden_states")
            assert isinstance(hidden, Tensor)
            self._tap.enter(block.number, hidden)

    def _leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        if not self._inside:
            return None
        new = self._tap.leave(self._inside.pop(), _first(output))
        return None if new is None else _replaced(output, new)

    def _source(self, name: str, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        self._turns[name] += 1
        sublayer = self._sources.get((self._inside[-1], name, self._turns[name] - 1)) if self._inside else None
        if sublayer is None:
            return None
        new = self._tap.write(sublayer, _first(output))
        return None if new is None else _replaced(output, new)

    def _norm(self, name: str, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        sublayer = self._norms.get((self._inside[-1], name)) if self._inside else None
        if sublayer is not None:
            self._tap.normed(sublayer, _first(output))

    def _writer(self, name: str, module: nn.Module, args: tuple[object, ...]) -> object:
        sublayer = self._writers.get((self._inside[-1], name)) if self._inside else None
        if sublayer is None or not args or not isinstance(args[0], Tensor):
            return None
        new = self._tap.activations(sublayer, args[0])
        return None if new is None else (new, *args[1:])

    def _experts(
        self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> object:
        sublayer = self._writers.get((self._inside[-1], name)) if self._inside else None
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if sublayer is None or len(tensors) != 3:
            return None
        new = self._tap.routed(sublayer, (tensors[0], tensors[1], tensors[2]), _first(output))
        return None if new is None else _replaced(output, new)


def _first(output: object) -> Tensor:
    tensor = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(tensor, Tensor)
    return tensor


def _replaced(output: object, new: Tensor) -> object:
    new = new.reshape(_first(output).shape)
    return (new, *output[1:]) if isinstance(output, (tuple, list)) else new
