"""Recording: what one run of the unedited model leaves for replays, run by run of every layer and attention module.

A module that runs several times in one forward, as ALBERT's one shared layer, stands for several layers: its runs are named
``module``, ``module#1``, ``module#2`` …, and everything here is by these names (:func:`~sinklab.attention.call.run_name`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor, nn

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import AttentionCall, Site, Statistics, run_name
from sinklab.attention.probe import Watcher
from sinklab.studies.causes.samples import Samples

__all__ = ["Calls", "Course", "Recording", "bytes_of", "stacked", "tensors_of"]


@dataclasses.dataclass(eq=False)
class Recording:
    """One run of the unedited model.

    Attributes:
        part: what it was run on.
        outputs: what the model returned; where logits are not formed, with the hidden states in their place.
        calls: the calls of those runs of attention modules that were asked for and had room.
        left: names of those that were asked for and had no room.
        sites: name to site, for all seen.
        times: how often a run called the attention function.
        course: what came before what, and what was given back.
    """

    part: Samples
    outputs: object
    calls: dict[str, AttentionCall]
    left: list[str]
    sites: dict[str, Site]
    times: Counter[str]
    course: Course
    _repeated: dict[tuple[str, int], object] = dataclasses.field(default_factory=dict)

    def before(self, name: str, edits: int) -> dict[str, list[object]]:
        """What the layers that had ended when a run of an attention module began gave back, once an edit; by module, in the
        order in which a replay asks for them."""
        given: dict[str, list[object]] = {}
        for module, layer in self.course.before[name]:
            if (layer, edits) not in self._repeated:  # made once, as many stacks begin with the same layers
                self._repeated[layer, edits] = stacked(self.course.layers[layer], len(self.part), edits)
            given.setdefault(module, []).append(self._repeated[layer, edits])
        return given


class Course:
    """The order in which layers and attention modules run in one forward, and what they give back.

    In a replay a layer that had ended gives back its record, and nothing inside it runs. So of what came before a run only that
    counts which stands in no layer that had ended by then: these layers give back, and these attention modules run again.

    Args:
        modules: attention modules that are followed; of an output that is a tuple the first member alone is kept.

    Attributes:
        layers: run of a layer to what it gave back.
        given: run of an attention module to what it gave back.
        before: run of an attention module to the layers that had ended, module and run, in order.
        turn: run of an attention module to its number among those of its module that run in a replay.
    """

    def __init__(self, anatomy: Anatomy, modules: Collection[str]) -> None:
        self.layers: dict[str, object] = {}
        self.given: dict[str, object] = {}
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
            if name in self._modules:
                # Behind the hidden states come weights of attention, of the size of the scores.
                self.given[label] = (output[0], *(None for _ in output[1:])) if isinstance(output, tuple) else output
            if name in self._anatomy.layers:
                self.layers[label] = output
                self._past[began:] = [(name, label)]

        return hook


class Calls(Watcher):
    """Keeps the calls of some runs of attention modules, and counts those of all.

    Args:
        wanted: names of runs; ``None`` for all.
        room: bytes that kept calls may take; the first is kept however large.
    """

    name, needs = "calls", frozenset[str]()

    def __init__(self, wanted: Collection[str] | None, room: float) -> None:
        self._wanted, self._room = wanted, room
        self.calls: dict[str, AttentionCall] = {}
        self.left: list[str] = []
        self.sites: dict[str, Site] = {}
        self.times: Counter[str] = Counter()

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        name = call.site.module
        self.times[name] += 1
        self.sites[name] = call.site
        if (self._wanted is not None and name not in self._wanted) or self.times[name] > 1:
            return
        self._room -= bytes_of(call)
        if self._room >= 0 or not self.calls:
            self.calls[name] = call
        else:
            self.left.append(name)


def bytes_of(call: AttentionCall) -> int:
    """Memory that a call keeps alive."""
    tensors = [getattr(call, field.name) for field in dataclasses.fields(call)]
    tensors.append(getattr(call.visible, "mask", None))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def tensors_of(value: object) -> Iterator[Tensor]:
    """All tensors inside a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def stacked(value: object, samples: int, edits: int) -> object:
    """A value with all its tensors repeated along the samples; those with one row for all samples stay as they are."""
    if isinstance(value, Tensor):
        shared = value.ndim == 0 or (value.shape[0] == 1 and samples > 1)
        return value if shared or edits == 1 else value.repeat(edits, *(1 for _ in value.shape[1:]))
    if isinstance(value, Mapping):
        items = {key: stacked(item, samples, edits) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        make: Callable[..., object] = type(value)
        return make(*(stacked(item, samples, edits) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([stacked(item, samples, edits) for item in value])
    return value
