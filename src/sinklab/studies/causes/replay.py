"""Replay: run the rest of a model behind one attention module, many edits of that module at a time.

The unedited model runs once and is recorded: what every layer gives back, and the attention calls. For a stack of edits,
inputs are repeated once an edit, every layer that had ended before the module began gives back its record, and the rest runs
as it is; a module that runs several times gives back the records of its earlier runs. In the run of the edit the attention
function gives back the edited head outputs; gates, norms and projections behind it are the model's own code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import AttentionCall, Site, Statistics, run_name, run_of
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.modules import held
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import MeasurementError
from sinklab.models.losses import LogitMap
from sinklab.studies.causes.samples import Samples

HeadsEdit: TypeAlias = tuple[Sequence[int], Tensor]
"""Numbers of heads, and their outputs ``(batch, q_len, heads, value_dim)``."""


@dataclasses.dataclass(eq=False)
class Recording:
    """One run of the unedited model; where logits are not formed, ``outputs`` have the hidden states in their place.

    ``calls`` are of the runs of attention modules that were asked for and had room, ``sites`` of all seen, and ``times`` says
    how often a run called the attention function. ``linears`` has input and output of linear maps, where changes alone are
    multiplied."""

    part: Samples
    outputs: object
    calls: dict[str, AttentionCall]
    sites: dict[str, Site]
    times: Counter[str]
    course: Course
    linears: dict[nn.Linear, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)
    _repeated: dict[tuple[str, int], object] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the calls that are kept, and of what layers and linear maps gave back."""
        kept = [getattr(call, field.name) for call in self.calls.values() for field in dataclasses.fields(call)]
        kept += [list(self.course.layers.values()), list(self.linears.values())]
        storages = [tensor.untyped_storage() for tensor in _tensors_of(kept)]  # several maps may have one input
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def forget_repeats(self) -> None:
        """Drop the copies that :meth:`before` has made."""
        self._repeated.clear()

    def before(self, name: str, edits: int) -> dict[str, list[object]]:
        """What layers that had ended when a run of an attention module began gave back, once an edit; by module, in order."""
        given: dict[str, list[object]] = {}
        for module, layer in self.course.before[name]:
            if (layer, edits) not in self._repeated:  # made once, as many stacks begin with the same layers
                self._repeated[layer, edits] = _stacked(self.course.layers[layer], len(self.part), edits)
            given.setdefault(module, []).append(self._repeated[layer, edits])
        return given


class Course:
    """The order in which layers and attention modules (``modules``) run in one forward, and what layers give back.

    In a replay a layer that had ended gives back its record, and nothing inside it runs. So ``before`` has, of a run of an
    attention module, the layers that had ended and stand in no other such layer; ``turn`` its number among the runs of its
    module in a replay."""

    def __init__(self, anatomy: Anatomy, modules: Collection[str]) -> None:
        self.layers: dict[str, object] = {}
        self.before: dict[str, list[tuple[str, str]]] = {}
        self.turn: dict[str, int] = {}
        self._anatomy, self._modules = anatomy, modules
        self._runs: Counter[str] = Counter()
        self._open: list[tuple[str, int]] = []
        self._past: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Hooks on the model until the block ends."""
        with contextlib.ExitStack() as stack:
            for name in dict.fromkeys((*self._anatomy.layers, *self._modules)):
                module = self._anatomy.modules[name]
                stack.callback(module.register_forward_pre_hook(self._begin(name)).remove)
                stack.callback(module.register_forward_hook(self._end(name)).remove)
            yield

    def _begin(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...]) -> None:
            label = run_name(name, self._runs[name])
            self._runs[name] += 1
            self._open.append((label, len(self._past)))
            if name in self._modules:
                self.before[label] = [entry for entry in self._past if entry[0] in self._anatomy.layers]
                self.turn[label] = sum(other == name for other, _ in self._past)
                self._past.append((name, label))

        return hook

    def _end(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            label, began = self._open.pop()
            if name in self._anatomy.layers:
                self.layers[label] = output
                self._past[began:] = [(name, label)]

        return hook


class _Calls(Watcher):
    """Keeps the calls of the wanted runs of attention modules, as far as there is room, and counts those of all."""

    name, needs = "calls", frozenset[str]()

    def __init__(self, wanted: Collection[str] | None, room: float) -> None:
        self._wanted, self._room = wanted, room
        self.calls: dict[str, AttentionCall] = {}
        self.sites: dict[str, Site] = {}
        self.times: Counter[str] = Counter()

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        name = call.site.module
        self.times[name] += 1
        self.sites[name] = call.site
        if (self._wanted is not None and name not in self._wanted) or self.times[name] > 1:
            return
        tensors = [getattr(call, field.name) for field in dataclasses.fields(call)] + [getattr(call.visible, "mask", None)]
        self._room -= sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))
        if self._room >= 0 or not self.calls:
            self.calls[name] = call


def _tensors_of(value: object) -> list[Tensor]:
    """All tensors inside a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _stacked(value: object, samples: int, edits: int) -> object:
    """A value with all its tensors repeated along the samples; those with one row for all samples stay as they are."""

    def repeated(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or (leaf.shape[0] == 1 and samples > 1) or edits == 1:
            return leaf
        return leaf.repeat(edits, *(1 for _ in leaf.shape[1:]))

    return pytree.tree_map(repeated, value)


class Replay:
    """Runs of one model in evaluation mode, which no other code may run meanwhile, with and without its logits.

    Args:
        logits: the vocabulary projection, if it is to be left out: its inputs then stand in the place of the logits.

    Attributes:
        coarse: whether linear maps behind an edit are multiplied as *what they gave unedited, and the change of their input in
            bfloat16*: rounded in proportion to the edit, twice as fast as float32 where a processor has instructions for it.
    """

    def __init__(self, model: nn.Module, logits: nn.Linear | None = None) -> None:
        self.model = model
        self.anatomy = Anatomy(model)
        self.logits = logits
        self.coarse = False
        self._rounded: dict[nn.Linear, Tensor] = {}

    def logit_map(self) -> LogitMap | None:
        """The map that was left out, ``None`` if logits are formed."""
        if self.logits is None:
            return None
        bias = None if self.logits.bias is None else self.logits.bias.detach()
        return LogitMap(held(self.logits, "weight"), bias, self.coarse)

    def _weight(self, linear: nn.Linear) -> Tensor:
        """Of a linear map, in bfloat16; made once."""
        if linear not in self._rounded:
            self._rounded[linear] = held(linear, "weight").to(torch.bfloat16)
        return self._rounded[linear]

    def record(self, part: Samples, runs: Collection[str] | None = None, room: float = float("inf")) -> Recording:
        """Run the unedited model; keep calls of ``runs`` of attention modules (all by default) in ``room`` bytes, the first
        always."""
        calls = _Calls(runs, room)
        course = Course(self.anatomy, set(self.anatomy.attention if runs is None else (run_of(name)[0] for name in runs)))
        linears: dict[nn.Linear, tuple[Tensor, Tensor]] = {}
        with course.followed(), self._without_logits(), self._linears(course, linears), attend(self.model, probes=[calls]):
            outputs = self.model(**lean_arguments(self.model, part.inputs, logits=True))
        return Recording(part, outputs, calls.calls, calls.sites, calls.times, course, linears)

    @contextlib.contextmanager
    def _linears(self, course: Course, kept: dict[nn.Linear, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Keep inputs and outputs of float32 linear maps from the first followed run on, of those that run once."""
        seen = Counter[nn.Linear]()

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(module, nn.Linear)
            seen[module] += 1
            kept.pop(module, None)
            if args and course.before and seen[module] == 1 and output.dtype == torch.float32:
                kept[module] = args[0], output

        with contextlib.ExitStack() as stack:
            for layer in self.anatomy.layers if self.coarse else ():
                for module in self.anatomy.modules[layer].modules():
                    if type(module) is nn.Linear:
                        stack.callback(module.register_forward_hook(hook).remove)
            yield

    def run(self, recording: Recording, name: str, edits: Sequence[HeadsEdit]) -> object:
        """What the model returns under a stack of edits of one run of an attention module, one edit after the other: numbers
        of heads, and their outputs ``(batch, q_len, heads, value_dim)``. The run must have called the attention function once.

        Raises:
            MeasurementError: the model wrote into a recorded output, which is of no further use.
        """
        call, number = recording.calls[name], len(edits)
        attention, turn = self.anatomy.attention[run_of(name)[0]], recording.course.turn[name]
        before = recording.before(name, number)
        versions = [tensor._version for tensor in _tensors_of(before)]
        with contextlib.ExitStack() as stack:
            for layer, given in before.items():
                stack.enter_context(_answering(self.anatomy.modules[layer], given))
            stack.enter_context(self._without_logits())
            last, edited = list[Tensor](), set(attention.modules())  # which projects the edit itself, in float32
            for linear, pair in recording.linears.items():
                if linear not in edited:
                    stack.enter_context(_replaced(linear, _OfChange(linear.forward, *pair, self._weight(linear), last)))
            stack.enter_context(seam.shadow(_Substitute(attention, turn, _edited(call, edits))))
            inputs = {key: _stacked(value, len(recording.part), number) for key, value in recording.part.inputs.items()}
            result = self.model(**lean_arguments(self.model, inputs, logits=True))
        if versions != [tensor._version for tensor in _tensors_of(before)]:
            raise MeasurementError(
                f"{type(self.model).__name__} writes into the outputs of its layers, so they cannot be replayed"
            )
        return result

    def _without_logits(self) -> contextlib.AbstractContextManager[None]:
        if self.logits is None:
            return contextlib.nullcontext()
        return _replaced(self.logits, lambda hidden: hidden)


@dataclasses.dataclass(eq=False)
class _Substitute(seam.Observer):
    """Answers the call of one attention module that follows so many others of it."""

    module: nn.Module
    others: int
    head_outputs: Tensor

    def owns(self, module: nn.Module) -> bool:
        return module is self.module

    def on_attention(self, native: seam.Native, module: nn.Module, *args: object, **kwargs: object) -> seam.Attended:
        self.others -= 1
        return (self.head_outputs, None) if self.others == -1 else native(module, *args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class _OfChange:
    """A linear map of repeated samples: what it gave unedited, and the change of its input times the rounded weight; ``last``
    are the last input and its change, as several maps have the same one."""

    own: Callable[[Tensor], Tensor]
    given: Tensor
    output: Tensor
    weight: Tensor
    last: list[Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.shape[1:] != self.given.shape[1:] or hidden.shape[0] % len(self.given):
            return self.own(hidden)
        if not self.last or self.last[0] is not hidden:
            self.last[:] = hidden, (hidden.reshape(-1, *self.given.shape) - self.given).to(self.weight.dtype)
        return (self.output + nn.functional.linear(self.last[1], self.weight)).flatten(0, 1)


@contextlib.contextmanager
def _answering(module: nn.Module, given: Sequence[object]) -> Iterator[None]:
    """A module whose first runs give back these, and that runs as it is behind them."""
    own, left = module.forward, iter(given)

    def forward(*args: object, **kwargs: object) -> object:
        for answer in left:
            return answer
        return own(*args, **kwargs)

    with _replaced(module, forward):
        yield


def _edited(call: AttentionCall, edits: Sequence[HeadsEdit]) -> Tensor:
    """Head outputs ``(edits * batch, q_len, num_heads, value_dim)``."""
    assert call.head_outputs is not None
    edited = call.head_outputs.expand(len(edits), *call.head_outputs.shape).clone()
    for target, (heads, outputs) in zip(edited, edits, strict=True):
        target[:, :, list(heads)] = outputs.to(target.dtype)
    return edited.flatten(0, 1)


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
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
