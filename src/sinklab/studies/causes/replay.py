"""Replay: run the rest of a model behind one attention module, many edits of that module at a time.

An edit of one attention module leaves all layers before it as they were, and the model behind it is a function of the layer's
input and of the module's head outputs. So the unedited model runs once and is recorded: what every layer gives back, and the
attention calls. Then, for a stack of edits, inputs are repeated once an edit, every layer that had ended before the module
began gives back its record, and the rest runs as it is. The edit itself enters in one of two ways: where the output of the
module is a linear map of its heads, the module gives back its record and the projected change; else the attention function
gives back the edited head outputs, and gates, norms and projections behind it are the model's own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import MeasurementError
from sinklab.studies.causes.replay_logits import LogitMap
from sinklab.studies.causes.samples import Samples

__all__ = ["Recording", "Replay", "bytes_of"]


@dataclasses.dataclass(eq=False)
class Recording:
    """One run of the unedited model.

    Attributes:
        part: what it was run on.
        outputs: what the model returned; where logits are not formed, with the hidden states in their place.
        calls: qualified name of an attention module to its call, for those that were asked for and had room.
        left: names of those that were asked for and had no room.
        sites: name to site, for all modules seen.
        times: name to the number of calls of the attention function.
        layers: name of a layer to what it gave back, for those that ran once.
        before: name of an attention module to the layers that had ended when it began.
        given: name of an attention module to what it gave back, of a tuple the first member alone.
    """

    part: Samples
    outputs: object
    calls: dict[str, AttentionCall]
    left: list[str]
    sites: dict[str, Site]
    times: Counter[str]
    layers: dict[str, object]
    before: dict[str, list[str]]
    given: dict[str, object]
    _repeated: dict[tuple[str, int], object] = dataclasses.field(default_factory=dict)

    def stacked(self, layer: str, edits: int) -> object:
        """What a layer gave back, once an edit; made once, as many stacks begin with the same layers."""
        if (layer, edits) not in self._repeated:
            self._repeated[layer, edits] = _stacked(self.layers[layer], len(self.part), edits)
        return self._repeated[layer, edits]


class Replay:
    """Runs of one model, with and without its logits.

    Args:
        model: in evaluation mode; no other code may run it meanwhile.
        logits: the vocabulary projection, if it is to be left out: its inputs then stand in the place of the logits.

    Attributes:
        maps: name of an attention module to the linear map from its heads to its output, float32 or wider ``(num_heads,
            hidden_size, value_dim)``, where it is known that its output is such a map (and a constant).
    """

    def __init__(self, model: nn.Module, logits: nn.Linear | None = None) -> None:
        self.model = model
        self.anatomy = Anatomy(model)
        self.logits = logits
        self.maps: dict[str, Tensor] = {}
        # A cache of keys is no use here, and would keep a copy of them.
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def logit_map(self) -> LogitMap | None:
        """The map that was left out, ``None`` if logits are formed."""
        if self.logits is None:
            return None
        return LogitMap(self.logits.weight.detach(), None if self.logits.bias is None else self.logits.bias.detach())

    def record(self, part: Samples, modules: Collection[str], room: float = float("inf")) -> Recording:
        """Run the unedited model.

        Args:
            modules: attention modules whose calls are wanted.
            room: bytes that kept calls may take; the first is kept however large.
        """
        calls = _Calls(modules, room)
        layers: dict[str, object] = {}
        ended: Counter[str] = Counter()
        before: dict[str, list[str]] = {}
        given: dict[str, object] = {}
        with contextlib.ExitStack() as stack:
            for name, module in self.anatomy.layers.items():
                stack.callback(module.register_forward_hook(_keep(name, layers, ended)).remove)
            for name in modules:
                handle = self.anatomy.attention[name].register_forward_pre_hook(_note(name, ended, before))
                stack.callback(handle.remove)
                stack.callback(self.anatomy.attention[name].register_forward_hook(_keep_first(name, given)).remove)
            stack.enter_context(self._without_logits())
            stack.enter_context(attend(self.model, probes=[calls]))
            outputs = self.model(**part.inputs, **self._options)
        once = {name for name, times in ended.items() if times == 1}
        before = {name: [layer for layer in layers if layer in once] for name, layers in before.items()}
        layers = {name: output for name, output in layers.items() if name in once}
        return Recording(part, outputs, calls.calls, calls.left, calls.sites, calls.times, layers, before, given)

    def run(self, recording: Recording, module: str, edits: Sequence[tuple[int, Tensor]]) -> object:
        """What the model returns under a stack of edits of one attention module, one edit after the other.

        Args:
            recording: of the same samples.
            module: qualified name; it must have been called once.
            edits: numbers of heads, and their outputs ``(batch, q_len, value_dim)``.

        Raises:
            MeasurementError: the model wrote into a recorded output, which is of no further use.
        """
        call, number = recording.calls[module], len(edits)
        arguments = {name: recording.stacked(name, number) for name in recording.before[module]}
        versions = [tensor._version for tensor in _tensors(arguments)]
        with contextlib.ExitStack() as stack:
            for name, value in arguments.items():
                stack.enter_context(_replaced(self.anatomy.modules[name], _giving(value)))
            stack.enter_context(self._without_logits())
            if module in self.maps:
                hidden = _projected(recording, module, self.maps[module], edits)
                output = recording.given[module]
                value = (hidden, *output[1:]) if isinstance(output, tuple) else hidden
                stack.enter_context(_replaced(self.anatomy.attention[module], _giving(value)))
            else:
                stack.enter_context(seam.shadow(_Substitute(self.anatomy.attention[module], _edited(call, edits))))
            inputs = {name: _stacked(given, len(recording.part), number) for name, given in recording.part.inputs.items()}
            result = self.model(**inputs, **self._options)
        if versions != [tensor._version for tensor in _tensors(arguments)]:
            raise MeasurementError(
                f"{type(self.model).__name__} writes into the outputs of its layers, so they cannot be replayed"
            )
        return result

    def linear_map(self, recording: Recording, module: str) -> Tensor | None:
        """What :attr:`maps` may hold for a module; to be proved."""
        call = recording.calls[module]
        assert call.head_outputs is not None
        heads, width = call.head_outputs.shape[2:]
        output = next(_tensors(recording.given[module]), None)  # a model's own output class has no first member
        if (
            output is None
            or not isinstance(recording.given[module], (Tensor, tuple))
            or output.shape[:2] != call.head_outputs.shape[:2]
        ):
            return None
        weight = self.anatomy.projection_weight(module, heads * width)
        if output.shape[2:].numel() == heads * width and output.reshape(call.head_outputs.shape).equal(call.head_outputs):
            weight = torch.eye(
                heads * width, dtype=output.dtype, device=output.device
            )  # in BERT and its kin the projection stands outside
        if weight is None or weight.shape[0] != output.shape[-1]:
            return None
        return (
            weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(1, (heads, width)).movedim(1, 0).contiguous()
        )

    def _without_logits(self) -> contextlib.AbstractContextManager[None]:
        if self.logits is None:
            return contextlib.nullcontext()
        return _replaced(self.logits, lambda hidden: hidden)


class _Calls(Watcher):
    """Keeps the calls of some attention modules, and counts those of all."""

    name, needs = "calls", frozenset[str]()

    def __init__(self, modules: Collection[str], room: float) -> None:
        self._wanted, self._room = set(modules), room
        self.calls: dict[str, AttentionCall] = {}
        self.left: list[str] = []
        self.sites: dict[str, Site] = {}
        self.times: Counter[str] = Counter()

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        name = call.site.module.partition("#")[0]  # a module that stands for several layers has a number behind its name
        self.times[name] += 1
        self.sites.setdefault(name, call.site)
        if name not in self._wanted or self.times[name] > 1:
            return
        self._room -= bytes_of(call)
        if self._room >= 0 or not self.calls:
            self.calls[name] = call
        else:
            self.left.append(name)


@dataclasses.dataclass(frozen=True, eq=False)
class _Substitute(seam.Observer):
    """Answers the call of one attention module."""

    module: nn.Module
    head_outputs: Tensor

    def owns(self, module: nn.Module) -> bool:
        return module is self.module

    def on_attention(
        self, native: Callable[..., object], module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[Tensor, None]:
        return self.head_outputs, None


def bytes_of(call: AttentionCall) -> int:
    """Memory that a call keeps alive."""
    tensors = [getattr(call, field.name) for field in dataclasses.fields(call)]
    tensors.append(getattr(call.visible, "mask", None))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def _keep(name: str, layers: dict[str, object], ended: Counter[str]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        layers[name] = output
        ended[name] += 1

    return hook


def _keep_first(name: str, given: dict[str, object]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        # Behind the hidden states come weights of attention, of the size of the scores.
        given[name] = (output[0], *(None for _ in output[1:])) if isinstance(output, tuple) else output

    return hook


def _note(name: str, ended: Counter[str], before: dict[str, list[str]]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...]) -> None:
        before.setdefault(name, list(ended))

    return hook


def _giving(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def _edited(call: AttentionCall, edits: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Head outputs ``(edits * batch, q_len, num_heads, value_dim)``."""
    assert call.head_outputs is not None
    stacked = call.head_outputs.expand(len(edits), *call.head_outputs.shape).clone()
    for target, (head, outputs) in zip(stacked, edits, strict=True):
        target[:, :, head] = outputs.to(target.dtype)
    return stacked.flatten(0, 1)


def _projected(recording: Recording, module: str, weight: Tensor, edits: Sequence[tuple[int, Tensor]]) -> Tensor:
    """What a module gives back, first tensor, with the projected changes of its heads."""
    call = recording.calls[module]
    assert call.head_outputs is not None
    output = next(_tensors(recording.given[module]))
    stacked = output.new_empty(len(edits), *output.shape)
    for target, (head, outputs) in zip(stacked, edits, strict=True):
        # Rounded as the model rounds its head outputs, and taken apart in float32.
        change = outputs.to(call.head_outputs.dtype).to(weight.dtype) - call.head_outputs[:, :, head].to(weight.dtype)
        torch.add(output, nn.functional.linear(change, weight[head]).reshape(output.shape).to(output.dtype), out=target)
    return stacked.flatten(0, 1)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _stacked(value: object, samples: int, edits: int) -> object:
    """A value with all its tensors repeated along the samples; those with one row for all samples stay as they are."""
    if isinstance(value, Tensor):
        shared = value.ndim == 0 or (value.shape[0] == 1 and samples > 1)
        return value if shared or edits == 1 else value.repeat(edits, *(1 for _ in value.shape[1:]))
    if isinstance(value, Mapping):
        stacked = {key: _stacked(item, samples, edits) for key, item in value.items()}
        return stacked if type(value) is dict else type(value)(**stacked)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        make: Callable[..., object] = type(value)
        return make(*(_stacked(item, samples, edits) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([_stacked(item, samples, edits) for item in value])
    return value


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
