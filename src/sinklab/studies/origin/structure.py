"""Structure: what every block of a model adds to the residual stream, found from the numbers of one pass and not from names.

A block is a member of a list of modules that holds attention. What comes out of it is what went in plus what its sublayers
write, whatever they are called; which tensors these are is seen from sums that come out (``x + write`` is what a later module
is given, or what the block returns), so that pre-norm, post-norm, sandwich norms, scales and parallel sublayers are one case.
:class:`Tap` is shown these writes as the model runs, and may change them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.modules import linear_map, named_modules, submodule
from sinklab.errors import UnsupportedModelError

Kind = Literal["attention", "cross-attention", "mlp", "block"]
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Norm of what a sum leaves unexplained, over the norm of the write; half precision rounds the sum itself to three digits."""
_HALF = 0.1


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """One write into the residual stream.

    Attributes:
        block: running number of the call of the block.
        stage: running number of the write, 1 for the first of the model; 0 is what enters the first block.
        kind: what it is; ``block`` for all that a block adds, where that could not be accounted for.
        source: qualified name of the module whose output, times ``scale``, is added, at its call ``turn`` within the block.
        writer: qualified name of the linear map that the source's output is a rescaling of.
        norm: module that the sum goes through before the next sublayer or the end of the block (post-norm), if any.
        attention: qualified name of the attention module, of a sublayer of attention.
    """

    block: int
    stage: int
    kind: Kind
    source: str
    scale: float = 1.0
    writer: str | None = None
    norm: str | None = None
    turn: int = 0
    attention: str | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """One call of a block: the ``call``-th, from 0, of a module that is called again where layers share weights (ALBERT);
    ``returns`` says whether it gives the hidden states alone, as they are or in a tuple, or more than these."""

    number: int
    module: str
    call: int
    sublayers: tuple[Sublayer, ...]
    returns: Literal["tensor", "tuple", "more"] = "more"

    @property
    def split(self) -> bool:
        """Whether its sublayers are known."""
        return all(sublayer.kind != "block" for sublayer in self.sublayers)

    @property
    def name(self) -> str:
        """``model.layers.3``, with the number of the call where the module is called more than once."""
        return self.module if not self.call else f"{self.module} (call {self.call})"


@dataclasses.dataclass(frozen=True)
class Structure:
    """The blocks of a model in the order of their calls, with all their writes."""

    blocks: tuple[Block, ...]

    @property
    def sublayers(self) -> list[Sublayer]:
        """All writes in order."""
        return [sublayer for block in self.blocks for sublayer in block.sublayers]

    @property
    def unsplit(self) -> list[str]:
        """Names of blocks whose output could not be accounted for."""
        return [block.name for block in self.blocks if not block.split]


class Tap:
    """What is shown of every forward of a model; override what is needed. Hidden states are ``(batch, length, width)``."""

    def enter(self, block: int, hidden: Tensor) -> None:
        """What enters a block."""

    def activations(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        """What is given to the linear map of a sublayer, ``(batch, length, units)``; other values if they are to be others."""

    def write(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        """A write; other values if they are to be others."""

    def normed(self, sublayer: Sublayer, values: Tensor) -> None:
        """What the norm behind a write makes of the sum, where there is one (post-norm)."""

    def leave(self, block: int, hidden: Tensor) -> Tensor | None:
        """What leaves a block; other values if they are to be others."""

    @contextlib.contextmanager
    def on(self, model: nn.Module, structure: Structure) -> Iterator[None]:
        """Be shown the forwards of a model until the ``with`` block ends."""
        with hooked(functools.partial(_Forward(self, structure).register, model)):
            yield


@contextlib.contextmanager
def hooked(register: Callable[[list[RemovableHandle]], None]) -> Iterator[None]:
    """Hooks for the length of a ``with`` block, taken away whatever happens."""
    handles: list[RemovableHandle] = []
    try:
        register(handles)
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def passing(model: nn.Module, structure: Structure, first: int, last: int, entering: Tensor) -> Iterator[None]:
    """Run the blocks ``first`` to ``last`` alone, as if ``entering`` had come out of those in front; the others pass on what
    they are given. Of models whose blocks return nothing besides."""
    numbers: dict[str, list[Block]] = {}
    for block in structure.blocks:
        numbers.setdefault(block.module, []).append(block)
    calls = Counter[str]()

    def forward(name: str, whole: Callable[..., object], *args: object, **kwargs: object) -> object:
        block = numbers[name][calls[name] % len(numbers[name])]
        calls[name] += 1
        if first <= block.number <= last:
            return whole(*args, **kwargs)
        hidden = entering if block.number < first else args[0] if args else kwargs["hidden_states"]
        return (hidden,) if block.returns == "tuple" else hidden

    modules = {name: submodule(model, name) for name in numbers}
    own = {name: vars(module).get("forward") for name, module in modules.items()}  # of hooks that move weights between devices
    try:
        for name, module in modules.items():
            vars(module)["forward"] = functools.partial(forward, name, module.forward)
        yield
    finally:
        for name, module in modules.items():
            vars(module).pop("forward")
            vars(module).update({} if own[name] is None else {"forward": own[name]})


class _Forward:
    """Where a forward is, block by block; its methods are the hooks that show it to a tap."""

    def __init__(self, tap: Tap, structure: Structure) -> None:
        self._tap, self._sublayers = tap, structure.sublayers
        self._blocks = {(block.module, block.call): block.number for block in structure.blocks}
        self._calls = Counter[str]()  # of blocks, in this forward
        self._turns = Counter[int]()  # of the sources of sublayers, in the block at hand
        self._inside: list[int] = []

    def register(self, model: nn.Module, handles: list[RemovableHandle]) -> None:
        """Add the hooks to a model."""
        modules = dict(named_modules(model))
        blocks = {name: modules[name] for name, _ in self._blocks}
        handles.append(model.register_forward_pre_hook(self._begin))
        for name, block in blocks.items():
            handles.append(block.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True))
        for sublayer in self._sublayers:
            if sublayer.writer is not None:
                hook = functools.partial(self._writer, sublayer)
                handles.append(modules[sublayer.writer].register_forward_pre_hook(hook))
            if sublayer.kind != "block":
                handles.append(modules[sublayer.source].register_forward_hook(functools.partial(self._source, sublayer)))
            if sublayer.norm is not None:
                handles.append(modules[sublayer.norm].register_forward_hook(functools.partial(self._norm, sublayer)))
        for block in blocks.values():
            handles.append(block.register_forward_hook(self._leave))

    def _begin(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self._calls.clear()
        self._inside.clear()

    def _enter(self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        number = self._blocks.get((name, self._calls[name]))
        self._calls[name] += 1
        if number is not None:
            self._turns.clear()
            self._inside.append(number)
            hidden = args[0] if args else kwargs.get("hidden_states")
            assert isinstance(hidden, Tensor)
            self._tap.enter(number, hidden)

    def _leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        return _replaced(output, self._tap.leave(self._inside.pop(), _first(output))) if self._inside else None

    def _is_in(self, sublayer: Sublayer) -> bool:
        return bool(self._inside) and self._inside[-1] == sublayer.block

    def _source(self, sublayer: Sublayer, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        if not self._is_in(sublayer):
            return None
        self._turns[sublayer.stage] += 1
        own = self._turns[sublayer.stage] - 1 == sublayer.turn
        return _replaced(output, self._tap.write(sublayer, _first(output))) if own else None

    def _norm(self, sublayer: Sublayer, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if self._is_in(sublayer):
            self._tap.normed(sublayer, _first(output))

    def _writer(self, sublayer: Sublayer, module: nn.Module, args: tuple[object, ...]) -> object:
        if not self._is_in(sublayer) or not args or not isinstance(args[0], Tensor):
            return None
        new = self._tap.activations(sublayer, args[0])
        return None if new is None else (new, *args[1:])


def _first(output: object) -> Tensor:
    tensor = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(tensor, Tensor)
    return tensor


def _replaced(output: object, new: Tensor | None) -> object:
    """The output of a module with another tensor in it; ``None``, which leaves it, where there is no other."""
    if new is None:
        return None
    new = new.reshape(_first(output).shape)
    return (new, *output[1:]) if isinstance(output, (tuple, list)) else new


@dataclasses.dataclass(eq=False)
class _Event:
    """A call of a module inside a block: its name, first tensor given and returned, each ``(batch, length, width)``."""

    name: str
    taken: Tensor | None
    returned: Tensor | None


@torch.no_grad()
def find_structure(model: nn.Module, forward: Callable[[], object]) -> Structure:
    """Run the model once on a few samples, by ``forward``, and see what its blocks add.

    Raises:
        UnsupportedModelError: no block gives hidden states of shape (batch, seq_len, hidden_size).
    """
    anatomy = Anatomy(model)
    blocks: list[Block] = []
    calls: Counter[str] = Counter()
    stack: list[tuple[str, Tensor, list[_Event]]] = []

    def begin(name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.ndim == 3:
            stack.append((name, hidden.detach().clone(), []))

    def inner(name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        if stack:
            shape = stack[-1][1].shape
            inputs = args[0] if args else kwargs.get("hidden_states")
            stack[-1][2].append(_Event(name, _shaped(inputs, shape), _shaped(output, shape)))

    def end(name: str, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if not stack or stack[-1][0] != name:
            return
        _, hidden, events = stack.pop()
        result = _shaped(output, hidden.shape)
        number, stage = len(blocks), 1 + sum(len(block.sublayers) for block in blocks)
        steps = [] if result is None else _account(hidden, result, events, anatomy)
        steps = steps or [Sublayer(number, stage, "block", name)]
        sublayers = tuple(dataclasses.replace(step, block=number, stage=stage + index) for index, step in enumerate(steps))
        alone = isinstance(output, tuple) and len(output) == 1
        returns: Literal["tensor", "tuple", "more"] = "tensor" if isinstance(output, Tensor) else "tuple" if alone else "more"
        blocks.append(Block(number, name, calls[name], sublayers, returns))
        calls[name] += 1

    def register(handles: list[RemovableHandle]) -> None:
        for name, layer in anatomy.layers.items():
            handles.append(layer.register_forward_pre_hook(functools.partial(begin, name), with_kwargs=True))
            for child, module in named_modules(layer):
                if child:
                    hook = functools.partial(inner, f"{name}.{child}")
                    handles.append(module.register_forward_hook(hook, with_kwargs=True))
            handles.append(layer.register_forward_hook(functools.partial(end, name)))

    with hooked(register):
        forward()
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of blocks with attention that goes through the attention interface of "
            "transformers and gives hidden states of shape (batch, seq_len, hidden_size); sinklab origin follows such blocks"
        )
    return Structure(tuple(blocks))


def _shaped(value: object, shape: torch.Size) -> Tensor | None:
    """The first tensor of an output if it has a number for every channel of every token; flat tokens are folded again."""
    tensor = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.shape[-1] != shape[-1]:
        return None
    return tensor.detach().reshape(shape) if tensor.numel() == shape.numel() else None


def _account(hidden: Tensor, result: Tensor, events: list[_Event], anatomy: Anatomy) -> list[Sublayer]:
    """The writes that lead from what entered a block to what left it; none where they cannot be found."""
    state, position, steps = hidden, -1, list[Sublayer]()
    pending: _Event | None = None  # a norm that was given the last sum, and may pass it on in its place
    while not _equal(state, result):
        step = _next(state, position, events, result)
        if step is None and pending is not None and pending.returned is not None:
            steps[-1] = dataclasses.replace(steps[-1], norm=pending.name)
            state, pending = pending.returned, None
            continue
        if step is None:
            both = _parallel(state, position, events, result)
            return [] if both is None else [*steps, *(_sublayer(index, position, 1.0, events, anatomy) for index in both)]
        index, scale, target, owner = step
        steps.append(_sublayer(index, position, scale, events, anatomy))
        state, position, pending = target, index, owner
    return steps


def _next(
    state: Tensor, position: int, events: list[_Event], result: Tensor
) -> tuple[int, float, Tensor, _Event | None] | None:
    """The next write."""
    targets = [(number, event.taken, event) for number, event in enumerate(events) if event.taken is not None]
    for number, target, owner in [*targets, (len(events), result, None)]:
        assert target is not None
        change = target - state
        if not bool(change.any()):
            continue
        # A module that is given the sum ends after the modules inside it have; its own number may be later than the write's.
        for index in range(min(number, len(events)) - 1, position, -1):
            write = events[index].returned
            if write is None or write is state or _equal(write, target):
                continue
            # As the model rounds it: of half precision a difference of sums has few digits left.
            scale = 1.0 if _equal(state + write, target) else _fitted(change, write)
            if scale is not None:
                return index, scale, target, owner
    return None


def _parallel(state: Tensor, position: int, events: list[_Event], result: Tensor) -> tuple[int, int] | None:
    """Two writes that are added to the same state: attention and MLP beside each other."""
    change, later = result - state, [index for index in range(position + 1, len(events)) if events[index].returned is not None]
    for second in reversed(later):
        for first in later:
            one, two = events[first].returned, events[second].returned
            if first >= second or one is None or two is None:
                continue
            rounded = (state + one + two, state + two + one, one + two + state)
            if any(_equal(total, result) for total in rounded) or _fitted(change - one, two) == 1.0:
                return first, second
    return None


def _fitted(change: Tensor, write: Tensor) -> float | None:
    """The factor with which a write is the change, 1 where it is about 1; ``None`` where it is not."""
    wide = torch.promote_types(change.dtype, torch.float32)
    change, write = change.to(wide), write.to(wide)
    size = float(write.square().sum())
    if not size:
        return None
    scale = float((change * write).sum()) / size
    left = float((change - scale * write).norm()) / max(float(change.norm()), 1e-30)
    if left > _tolerance(change) or not scale:
        return None
    return 1.0 if abs(scale - 1.0) < _tolerance(change) else scale


def _tolerance(tensor: Tensor) -> float:
    return _CLOSE.get(tensor.dtype, _HALF)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


def _sublayer(index: int, before: int, scale: float, events: list[_Event], anatomy: Anatomy) -> Sublayer:
    """A write with its kind and the linear map behind it; its numbers are filled in by the caller."""
    source = events[index]
    assert source.returned is not None
    projections = {projection: name for name in anatomy.attention if (projection := anatomy.projection_name(name)) is not None}
    writer: str | None = None
    for event in reversed(events[before + 1 : index + 1]):
        module = anatomy.modules[event.name]
        if event.returned is None or not _is_linear(module):
            continue
        if _rescaled(event.returned, source.returned):
            writer = event.name
            break
    ran = {event.name for event in events}
    related = (name for name in anatomy.attention if name in ran and _related(name, source.name))
    near = projections.get(writer or "") or next(related, None)
    kind: Kind = "mlp" if near is None else "cross-attention" if anatomy.is_cross(near) else "attention"
    turn = sum(event.name == source.name for event in events[:index])
    return Sublayer(0, 0, kind, source.name, scale, writer, turn=turn, attention=near)


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a linear map with its weights as floating-point numbers, whatever adapters are put round it."""
    core = linear_map(module)
    return core is not None and core.weight.is_floating_point()


def _rescaled(write: Tensor, source: Tensor) -> bool:
    """Whether a tensor is another one times a factor for each token and a factor for each channel (RMS norm, layer scale)."""
    if _equal(write, source):
        return True
    wide = torch.promote_types(write.dtype, torch.float32)
    x, y = write.flatten(0, 1).to(wide), source.flatten(0, 1).to(wide)
    token = torch.ones(len(x), 1, dtype=wide, device=x.device)
    channel = torch.ones(1, x.shape[1], dtype=wide, device=x.device)
    before, enough = float("inf"), _tolerance(y) * float(y.norm())
    for _ in range(200):  # alternating least squares: slow where one token is a thousand times the others
        channel = (token * x * y).sum(0, keepdim=True) / (token * x).square().sum(0, keepdim=True).clamp_min(1e-30)
        token = (channel * x * y).sum(1, keepdim=True) / (channel * x).square().sum(1, keepdim=True).clamp_min(1e-30)
        left = float((y - token * channel * x).norm())
        if left <= enough or left > 0.98 * before:
            return left <= enough
        before = left
    return False
