"""Tap: the writes of a model as it runs, shown one by one and open to edits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
        modules = dict(model.named_modules())
        by_call = {(block.module, block.call): block for block in structure.blocks}
        known = [sublayer for sublayer in structure.sublayers if sublayer.kind != "block"]
        sources = {(sublayer.block, sublayer.source, sublayer.turn): sublayer for sublayer in known}
        writers = {(sublayer.block, sublayer.writer): sublayer for sublayer in structure.sublayers if sublayer.writer}
        norms = {(sublayer.block, sublayer.norm): sublayer for sublayer in structure.sublayers if sublayer.norm}
        calls, turns, inside = Counter[str](), Counter[str](), list[int]()

        def started(module: nn.Module, args: tuple[object, ...]) -> None:
            calls.clear()
            inside.clear()
            self.begin()

        def entered(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
                block = by_call.get((name, calls[name]))
                calls[name] += 1
                if block is not None:
                    turns.clear()
                    inside.append(block.number)
                    hidden = args[0] if args else kwargs.get("hidden_states")
                    assert isinstance(hidden, Tensor)
                    self.enter(block.number, hidden)

            return hook

        def left(module: nn.Module, args: tuple[object, ...], output: object) -> object:
            if not inside:
                return None
            new = self.leave(inside.pop(), _first(output))
            return None if new is None else _replaced(output, new)

        def wrote(name: str) -> Callable[..., object]:
            def hook(module: nn.Module, args: tuple[object, ...], output: object) -> object:
                turns[name] += 1
                sublayer = sources.get((inside[-1], name, turns[name] - 1)) if inside else None
                if sublayer is None:
                    return None
                new = self.write(sublayer, _first(output))
                return None if new is None else _replaced(output, new)

            return hook

        def passed(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
                sublayer = norms.get((inside[-1], name)) if inside else None
                if sublayer is not None:
                    self.normed(sublayer, _first(output))

            return hook

        def given(name: str) -> Callable[..., object]:
            def hook(module: nn.Module, args: tuple[object, ...]) -> object:
                sublayer = writers.get((inside[-1], name)) if inside else None
                if sublayer is None or not args or not isinstance(args[0], Tensor):
                    return None
                new = self.activations(sublayer, args[0])
                return None if new is None else (new, *args[1:])

            return hook

        def chose(name: str) -> Callable[..., object]:
            def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
                sublayer = writers.get((inside[-1], name)) if inside else None
                tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
                if sublayer is None or len(tensors) != 3:
                    return None
                new = self.routed(sublayer, (tensors[0], tensors[1], tensors[2]), _first(output))
                return None if new is None else _replaced(output, new)

            return hook

        def register(handles: list[RemovableHandle]) -> None:
            handles.append(model.register_forward_pre_hook(started))
            for name in dict.fromkeys(block.module for block in structure.blocks):
                handles.append(modules[name].register_forward_pre_hook(entered(name), with_kwargs=True))
            for name in dict.fromkeys(sublayer.writer for sublayer in structure.sublayers if sublayer.writer is not None):
                if is_experts(modules[name]):
                    handles.append(modules[name].register_forward_hook(chose(name), with_kwargs=True))
                else:
                    handles.append(modules[name].register_forward_pre_hook(given(name)))
            for name in dict.fromkeys(sublayer.source for sublayer in known):
                handles.append(modules[name].register_forward_hook(wrote(name)))
            for name in dict.fromkeys(sublayer.norm for sublayer in structure.sublayers if sublayer.norm is not None):
                handles.append(modules[name].register_forward_hook(passed(name)))
            for name in dict.fromkeys(block.module for block in structure.blocks):
                handles.append(modules[name].register_forward_hook(left))

        with hooked(register):
            yield


def _first(output: object) -> Tensor:
    tensor = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(tensor, Tensor)
    return tensor


def _replaced(output: object, new: Tensor) -> object:
    new = new.reshape(_first(output).shape)
    return (new, *output[1:]) if isinstance(output, (tuple, list)) else new
