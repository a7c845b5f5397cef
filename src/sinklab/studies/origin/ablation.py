"""Ablation: units silenced, set to a mean or to another sample's value, and what attention, spikes and loss do then.

Many edits run side by side, each on its own copy of some samples in one batch, so that a small model costs few forwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.attention.names import submodule
from sinklab.attention.session import attend
from sinklab.corpora.samples import Samples
from sinklab.models.losses import IGNORED, cross_entropies, loss_kind
from sinklab.models.registers import Registers, add_registers
from sinklab.results.run import Progress
from sinklab.studies.measure.probing import scored_pairs
from sinklab.studies.origin.decomposition import Experts, Linear, Routing, Writer
from sinklab.studies.origin.structure import Structure, Sublayer, Tap, hooked
from sinklab.studies.origin.tracing import OriginSetting, PlaceWeights, largest_over_median

__all__ = [
    "MODES",
    "Edit",
    "Measured",
    "Moved",
    "mean_losses",
    "measure_registers",
    "new_values",
    "read_columns",
    "run_edits",
    "takes_loss",
]

Mode = Literal["zero", "mean", "resampled", "constant"]
MODES: dict[Mode, str] = {
    "zero": "activation 0 at every position",
    "mean": "at the place the mean over all other positions of all samples",
    "resampled": "at the place the value at another position, drawn at random, of another sample",
    "constant": "at the place the mean over the other samples at the place itself",
}
"""What is done with the activation of a unit."""


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """One change of the model; with nothing given none.

    Attributes:
        name: of the change.
        stage: of the write that is edited.
        columns, values: columns of the writer's input and what they become, ``(samples, length, columns)``; NaN to stay.
        write: what the whole write becomes at the place, ``(samples, 1, width)`` or broadcast to it; ``None`` to leave it.
        mean_write: the whole write at the place becomes its mean over the other tokens of the same sample.
        block, channels, state: channels of what leaves a block, and what they become at the place, ``(channels,)``.
    """

    name: str
    stage: int = -1
    columns: Tensor | None = None
    values: Tensor | None = None
    write: Tensor | None = None
    mean_write: bool = False
    block: int = -1
    channels: Tensor | None = None
    state: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """What is seen of every sample under an edit.

    Attributes:
        loss: float64 ``(samples,)``, mean over its scored positions; NaN where none is taken.
        spikes: float64 ``(samples, blocks)``: largest over median size of what leaves each block, other sinks and spikes left
            out of the largest.
        spiked: boolean, of the same shape: whether that largest stands at the place.
        weights, pulls, uniform: by attention module, see :class:`~sinklab.studies.origin.tracing.PlaceWeights`.
        layers: running number of each attention module.
    """

    loss: Tensor
    spikes: Tensor
    spiked: Tensor
    weights: Mapping[str, Tensor]
    pulls: Mapping[str, Tensor]
    uniform: Mapping[str, Tensor]
    layers: Mapping[str, int]


class _Edited(Tap):
    """Carries out edits, one for every row of the batch, and watches the size of the hidden states."""

    def __init__(
        self, edits: Sequence[Edit], rows: Tensor, masks: tuple[Tensor, Tensor, Tensor], sublayers: Mapping[int, Writer | None]
    ) -> None:
        self.edits, self.rows = edits, rows
        self.at, self.others, self.real = masks
        self.writers = sublayers
        self.spikes: list[Tensor] = []
        self.spiked: list[Tensor] = []

    def _by_edit(self) -> Iterator[tuple[Edit, slice]]:
        start = 0
        for stop in range(1, len(self.edits) + 1):
            if stop == len(self.edits) or self.edits[stop] is not self.edits[start]:
                yield self.edits[start], slice(start, stop)
                start = stop

    def activations(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        shape = values.shape
        edited = None
        for edit, rows in self._by_edit():
            if edit.stage == sublayer.stage and edit.columns is not None and edit.values is not None:
                if edited is None:
                    edited = values.clone().reshape(*self.at.shape, shape[-1])
                columns = edit.columns.to(values.device)
                new = edit.values[self.rows[rows]].to(values)
                old = edited[rows][..., columns]
                edited[rows, :, columns] = torch.where(new.isnan(), old, new)
        return None if edited is None else edited.reshape(shape)

    def routed(self, sublayer: Sublayer, arguments: Routing, output: Tensor) -> Tensor | None:
        writer = self.writers.get(sublayer.stage)
        if not isinstance(writer, Experts):
            return None
        edited = None
        for edit, rows in self._by_edit():
            if edit.stage == sublayer.stage and edit.columns is not None and edit.values is not None:
                if edited is None:
                    edited = output.clone().reshape(*self.at.shape, output.shape[-1])
                own: list[Tensor] = []
                for argument in arguments:
                    own.append(argument.reshape(*self.at.shape, -1)[rows].flatten(0, 1))
                old = writer.read_columns((own[0], own[1], own[2]), edit.columns).unflatten(0, (-1, self.at.shape[1]))
                new = edit.values[self.rows[rows]].to(old)
                change = torch.where(new.isnan(), torch.zeros_like(old), new - old)
                edited[rows] += change @ writer.directions(edit.columns)
        return None if edited is None else edited.reshape(output.shape)

    def write(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        edited = None
        for edit, rows in self._by_edit():
            if edit.stage == sublayer.stage and (edit.write is not None or edit.mean_write):
                if edited is None:
                    edited = values.clone().reshape(*self.at.shape, values.shape[-1])
                at, others = (mask[rows].to(values.device)[..., None] for mask in (self.at, self.others))
                if edit.write is not None:
                    new = edit.write.to(values)
                else:
                    new = (edited[rows] * others).sum(1, keepdim=True) / others.sum(1, keepdim=True)
                edited[rows] = torch.where(at, new, edited[rows])
        return edited

    def leave(self, block: int, hidden: Tensor) -> Tensor | None:
        edited = None
        for edit, rows in self._by_edit():
            if edit.block == block and edit.channels is not None and edit.state is not None:
                edited = hidden.clone() if edited is None else edited
                channels, at = edit.channels.to(hidden.device), self.at[rows].to(hidden.device)[..., None]
                old = edited[rows][..., channels]
                edited[rows, :, channels] = torch.where(at, edit.state.to(hidden), old)
        state = hidden if edited is None else edited
        times, here = largest_over_median(state, self.at, self.others, self.real)
        self.spikes.append(times)
        self.spiked.append(here)
        return edited


@torch.no_grad()
def run_edits(
    model: nn.Module,
    structure: Structure,
    edits: Sequence[Edit],
    writers: Mapping[int, Writer | None],
    samples: Samples,
    masks: tuple[Tensor, Tensor, Tensor],
    forward: Callable[[Samples], object],
    batch_size: int,
    *,
    progress: Progress,
    stage: str,
) -> list[Measured]:
    """Every edit on every sample.

    Args:
        writers: by stage of the write.
        masks: which tokens are the place, which are others, and which are no padding, boolean ``(samples, length)``.
        batch_size: samples a forward, copies for several edits counted.
    """
    taken = takes_loss(model, samples)
    rows = [(edit, sample) for edit in range(len(edits)) for sample in range(len(samples))]
    losses, spikes, spiked, seen, layers = [], [], [], list[tuple[PlaceWeights, int]](), dict[str, int]()
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        numbers = torch.tensor([sample for _, sample in chunk])
        batch = samples.take(numbers)
        tap = _Edited(
            [edits[edit] for edit, _ in chunk], numbers, (masks[0][numbers], masks[1][numbers], masks[2][numbers]), writers
        )
        weights = PlaceWeights(masks[0][numbers])
        with tap.on(model, structure), attend(model, [weights], verify=start == 0):
            output = forward(batch)
        if taken and batch.scored is not None:  # other samples are scored: masked texts, under the same edits
            apart = _Edited(tap.edits, numbers, (tap.at, tap.others, tap.real), writers)
            with apart.on(model, structure):
                output = forward(batch.scored)
            batch = batch.scored
        losses.append(mean_losses(output, batch) if taken else torch.full((len(batch),), float("nan")))
        spikes.append(torch.stack(tap.spikes, 1))
        spiked.append(torch.stack(tap.spiked, 1))
        seen.append((weights, len(chunk)))
        layers |= weights.layers
        progress(stage, start + len(chunk), len(rows))
    loss, spike, here = torch.cat(losses), torch.cat(spikes), torch.cat(spiked)
    count = len(samples)

    def part(values: Tensor, edit: int) -> Tensor:
        return values[edit * count : (edit + 1) * count]

    def parted(kind: str, edit: int) -> dict[str, Tensor]:
        return {name: part(torch.cat([getattr(weights, kind)[name] for weights, _ in seen]), edit) for name in layers}

    return [
        Measured(
            loss=part(loss, edit), spikes=part(spike, edit), spiked=part(here, edit),
            weights=parted("weights", edit), pulls=parted("pulls", edit), uniform=parted("uniform", edit), layers=layers,
        )
        for edit in range(len(edits))
    ]  # fmt: skip


def takes_loss(model: nn.Module, samples: Samples) -> bool:
    """Whether samples of this kind have a loss under the model."""
    return samples.targets is not None or samples.scored is not None or loss_kind(model) == "next token"


@torch.no_grad()
def clean_losses(model: nn.Module, samples: Samples, forward: Callable[[Samples], object], batch_size: int) -> Tensor:
    """Mean loss of every sample under the model as it is, float64 ``(samples,)``; NaN where none is taken."""
    if not takes_loss(model, samples):
        return torch.full((len(samples),), float("nan"), dtype=torch.float64)
    scored = [batch.scored or batch for batch in samples.batches(batch_size)]
    return torch.cat([mean_losses(forward(batch), batch) for batch in scored])


def mean_losses(output: object, samples: Samples) -> Tensor:
    """Mean loss of every sample over its scored positions, float64 ``(samples,)``; NaN for a sample without one."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        return torch.full((len(samples),), float("nan"), dtype=torch.float64)
    own, targets = scored_pairs(logits, samples)
    scored = (targets != IGNORED).to(own.device)
    sums = cross_entropies(own, targets).double().masked_fill(~scored, 0.0).sum(1)
    return (sums / scored.sum(1)).cpu()


class _Read(Tap):
    def __init__(self, sublayer: Sublayer, writer: Writer, columns: Tensor, length: int) -> None:
        self.sublayer, self.writer, self.columns, self.length = sublayer, writer, columns, length
        self.read: list[Tensor] = []

    def activations(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage:
            own = values.detach()[..., self.columns.to(values.device)]
            self.read.append(own.reshape(-1, self.length, len(self.columns)).float().cpu())

    def routed(self, sublayer: Sublayer, arguments: Routing, output: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage and isinstance(self.writer, Experts):
            own = self.writer.read_columns(arguments, self.columns)
            self.read.append(own.reshape(-1, self.length, len(self.columns)).float().cpu())


@torch.no_grad()
def read_columns(
    model: nn.Module,
    structure: Structure,
    sublayer: Sublayer,
    writer: Writer,
    columns: Tensor,
    samples: Samples,
    length: int,
    forward: Callable[[Samples], object],
    batch_size: int,
) -> Tensor:
    """Activations of some columns at every token, float32 ``(samples, length, columns)``."""
    tap = _Read(sublayer, writer, columns, length)
    with tap.on(model, structure):
        for batch in samples.batches(batch_size):
            forward(batch)
    return torch.cat(tap.read)


def new_values(mode: Mode, clean: Tensor, at: Tensor, others: Tensor, generator: torch.Generator) -> Tensor:
    """What the activations become, ``(samples, length, columns)``; NaN where they stay as they are.

    Args:
        clean: of the model as it is, same shape.
        at, others: which tokens are the place, and which are others, boolean ``(samples, length)``.
    """
    if mode == "zero":
        return torch.zeros_like(clean)
    new = torch.full_like(clean, float("nan"))
    if mode == "mean":
        new[at] = clean[others].mean(0)
    elif mode == "resampled":
        rows, _ = torch.nonzero(at, as_tuple=True)
        owners = torch.nonzero(others)[:, 0]
        drawn = clean[others]
        chosen = []
        for row in rows.tolist():
            foreign = torch.nonzero(owners != row)[:, 0]
            chosen.append(int(foreign[int(torch.randint(len(foreign), (), generator=generator))]))
        new[at] = drawn[torch.tensor(chosen)]
    else:
        sums = (clean * at[..., None]).sum(1)
        counts = at.sum(1)[:, None].to(clean)
        rest = (sums.sum(0) - sums) / (counts.sum(0) - counts).clamp_min(1)
        new = torch.where(at[..., None], rest[:, None], new)
    return new


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """What is seen of every sample with registers.

    Attributes:
        number: of registers.
        loss: float64 ``(samples,)``; NaN where none is taken.
        spikes: float64 ``(samples, blocks)``: largest over median size of what leaves each block, at the model's own tokens,
            other sinks and spikes left out of the largest.
        weights: on the place, by attention module, float64 ``(samples, heads)``.
        on_registers: the same, on all registers together.
        divergence, silenced: float64 ``(samples,)``: KL divergence in nats of the class probabilities from those of the model
            as it is, with registers, and with the neurons 0 at all tokens and no registers; NaN for outputs of another kind.
    """

    number: int
    loss: Tensor
    spikes: Tensor
    weights: dict[str, Tensor]
    on_registers: dict[str, Tensor]
    divergence: Tensor
    silenced: Tensor


class _OnRegisters(PlaceWeights):
    name = "register_weights"


@torch.no_grad()
def measure_registers(setting: OriginSetting, at: Tensor, writer: Linear, units: Sequence[int], number: int) -> Moved:
    """Run a model of pictures with and without registers.

    Args:
        at: boolean ``(samples, length)``: the tokens of the place.
        units: neurons of the writer that are moved.
        number: of registers.

    Raises:
        UnsupportedModelError: see :func:`~sinklab.models.registers.add_registers`.
    """
    model, blocks = setting.model, list(dict.fromkeys(block.module for block in setting.structure.blocks))
    losses, divergences, silenced, spikes = [], [], [], []
    seen: list[tuple[PlaceWeights, PlaceWeights]] = []
    taken = takes_loss(model, setting.samples)
    for start in range(0, len(setting.samples), setting.batch_size):
        rows = torch.arange(start, min(start + setting.batch_size, len(setting.samples)))
        batch = setting.samples.take(rows)
        clean = setting.forward(batch)
        with _silenced(model, writer, units):
            silenced.append(_divergence(clean, setting.forward(batch), len(rows)))
        with add_registers(model, {writer.path: list(units)}, number=number) as registers:
            setting.forward(batch)  # which says how many tokens stand in front
            watchers = _watchers(at[rows], registers)
            sizes: list[Tensor] = []
            masks = (at[rows], setting.others[rows], setting.real[rows])
            with _spikes(model, blocks, registers, masks, sizes), attend(model, watchers, verify=start == 0):
                output = setting.forward(batch)
        losses.append(mean_losses(output, batch) if taken else torch.full((len(rows),), float("nan"), dtype=torch.float64))
        divergences.append(_divergence(clean, output, len(rows)))
        spikes.append(torch.stack(sizes, 1))
        seen.append(watchers)
        setting.progress("registers", int(rows[-1]) + 1, len(setting.samples))

    def joined(which: int) -> dict[str, Tensor]:
        return {label: torch.cat([pair[which].weights[label] for pair in seen]) for label in seen[0][which].weights}

    return Moved(
        number, torch.cat(losses), torch.cat(spikes), joined(0), joined(1), torch.cat(divergences), torch.cat(silenced)
    )


def _watchers(at: Tensor, registers: Registers) -> tuple[PlaceWeights, PlaceWeights]:
    """Of the place and of the registers, over positions that have these."""
    front, behind = at[:, : registers.front], at[:, registers.front :]
    added = torch.ones(len(at), registers.number, dtype=torch.bool)
    place = torch.cat((front, ~added, behind), 1)
    there = torch.cat((torch.zeros_like(front), added, torch.zeros_like(behind)), 1)
    return PlaceWeights(place), _OnRegisters(there)


@contextlib.contextmanager
def _spikes(
    model: nn.Module, blocks: Sequence[str], registers: Registers, masks: tuple[Tensor, Tensor, Tensor], sizes: list[Tensor]
) -> Iterator[None]:
    """Largest over median size of what leaves each block, at the model's own tokens, one tensor ``(samples,)`` a block."""

    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        assert isinstance(hidden, Tensor)
        if hidden.shape[1] != masks[0].shape[1]:
            hidden = registers.left_out(hidden)
        sizes.append(largest_over_median(hidden, *masks)[0])

    def register(handles: list[RemovableHandle]) -> None:
        handles += [submodule(model, name).register_forward_hook(hook) for name in blocks]

    with hooked(register):
        yield


@contextlib.contextmanager
def _silenced(model: nn.Module, writer: Linear, units: Sequence[int]) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].index_fill(-1, torch.tensor(units, device=args[0].device), 0.0), *args[1:])

    with hooked(lambda handles: handles.append(submodule(model, writer.path).register_forward_pre_hook(hook))):
        yield


def _divergence(clean: object, changed: object, samples: int) -> Tensor:
    """KL divergence of each sample's class probabilities from those of the model as it is; NaN where there are no classes."""
    before, after = (getattr(output, "logits", None) for output in (clean, changed))
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.ndim != 2:
        return torch.full((samples,), float("nan"), dtype=torch.float64)
    own, other = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (own.exp() * (own - other)).sum(-1).cpu()
