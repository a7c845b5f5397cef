"""Ablation: units silenced, set to a mean or to another sample's value, or moved to registers, and what goes with them.

Many edits run side by side, each on its own copy of some samples in one batch, so that a small model costs few forwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.attention.modules import submodule
from sinklab.attention.session import attend
from sinklab.corpora.samples import Samples
from sinklab.models.losses import IGNORED, cross_entropies, loss_kind
from sinklab.models.registers import add_registers
from sinklab.studies.measure.probing import scored_pairs
from sinklab.studies.origin.decomposition import Experts, Linear, Routing, Writer
from sinklab.studies.origin.structure import Sublayer, Tap, hooked
from sinklab.studies.origin.tracing import OriginSetting, PlaceWeights, largest_over_median

__all__ = [
    "MODES",
    "Edit",
    "Measured",
    "Mode",
    "Moved",
    "clean_losses",
    "measure_registers",
    "new_values",
    "read_columns",
    "run_edits",
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
        name, on, what: of the change, what it is made on (``units``, ``controls``, ``write``, ``channels``), and in words.
        stage: of the write that is edited.
        columns, values: columns of the writer's input and what they become, ``(samples, length, columns)``; NaN to stay.
        write: the whole write at the place becomes 0, or its mean over the other tokens of the same sample.
        block, channels, state: channels of what leaves a block, and what they become at the place, ``(channels,)``.
    """

    name: str
    on: str = ""
    what: str = ""
    stage: int = -1
    columns: Tensor | None = None
    values: Tensor | None = None
    write: Literal["zero", "mean"] | None = None
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
        self, edits: Sequence[Edit], rows: Tensor, masks: Sequence[Tensor], writers: Mapping[int, Writer | None]
    ) -> None:
        self.edits, self.rows, self.writers = edits, rows, writers
        self.at, self.others, self.real = (mask[rows] for mask in masks)
        self.spikes: list[Tensor] = []
        self.spiked: list[Tensor] = []

    def _by_edit(self) -> Iterator[tuple[Edit, slice]]:
        start = 0
        for stop in range(1, len(self.edits) + 1):
            if stop == len(self.edits) or self.edits[stop] is not self.edits[start]:
                yield self.edits[start], slice(start, stop)
                start = stop

    def _of_units(self, stage: int) -> list[tuple[slice, Tensor, Tensor]]:
        """Rows, columns and new values of the edits of units of a write."""
        return [
            (rows, edit.columns, edit.values[self.rows[rows]])
            for edit, rows in self._by_edit()
            if edit.stage == stage and edit.columns is not None and edit.values is not None
        ]

    def activations(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        edited = None
        for rows, columns, new in self._of_units(sublayer.stage):
            edited = values.clone().reshape(*self.at.shape, -1) if edited is None else edited
            columns, new = columns.to(values.device), new.to(values)
            edited[rows, :, columns] = torch.where(new.isnan(), edited[rows][..., columns], new)
        return None if edited is None else edited.reshape(values.shape)

    def routed(self, sublayer: Sublayer, arguments: Routing, output: Tensor) -> Tensor | None:
        writer = self.writers.get(sublayer.stage)
        if not isinstance(writer, Experts):
            return None
        edited = None
        for rows, columns, new in self._of_units(sublayer.stage):
            edited = output.clone().reshape(*self.at.shape, -1) if edited is None else edited
            tokens, chosen, weights = (part.reshape(*self.at.shape, -1)[rows].flatten(0, 1) for part in arguments)
            old = writer.read((tokens, chosen, weights), columns).unflatten(0, (-1, self.at.shape[1]))
            new = new.to(old)
            edited[rows] += torch.where(new.isnan(), torch.zeros_like(old), new - old) @ writer.directions(columns)
        return None if edited is None else edited.reshape(output.shape)

    def write(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        edited = None
        for edit, rows in self._by_edit():
            if edit.stage == sublayer.stage and edit.write is not None:
                edited = values.clone().reshape(*self.at.shape, -1) if edited is None else edited
                at, others = (mask[rows].to(values.device)[..., None] for mask in (self.at, self.others))
                new = (edited[rows] * others).sum(1, keepdim=True) / others.sum(1, keepdim=True)
                edited[rows] = torch.where(at, new if edit.write == "mean" else torch.zeros_like(new), edited[rows])
        return edited

    def leave(self, block: int, hidden: Tensor) -> Tensor | None:
        edited = None
        for edit, rows in self._by_edit():
            if edit.block == block and edit.channels is not None and edit.state is not None:
                edited = hidden.clone() if edited is None else edited
                channels, at = edit.channels.to(hidden.device), self.at[rows].to(hidden.device)[..., None]
                edited[rows, :, channels] = torch.where(at, edit.state.to(hidden), edited[rows][..., channels])
        times, here = largest_over_median(hidden if edited is None else edited, self.at, self.others, self.real)
        self.spikes.append(times)
        self.spiked.append(here)
        return edited


@torch.no_grad()
def run_edits(
    setting: OriginSetting, edits: Sequence[Edit], at: Tensor, writers: Mapping[int, Writer | None], stage: str
) -> list[Measured]:
    """Every edit on every sample.

    Args:
        at: boolean ``(samples, length)``: the tokens of the place.
        writers: by stage of the write.
        stage: what is said of the progress.
    """
    model, samples, masks = setting.model, setting.samples, (at, setting.others, setting.real)
    takes_loss, count = _takes_loss(model, samples), len(samples)
    rows = [(edit, sample) for edit in range(len(edits)) for sample in range(count)]
    losses, taps, watched = list[Tensor](), list[_Edited](), list[PlaceWeights]()
    for start in range(0, len(rows), setting.batch_size):
        chunk = rows[start : start + setting.batch_size]
        own, numbers = [edits[edit] for edit, _ in chunk], torch.tensor([sample for _, sample in chunk])
        batch = samples.take(numbers)
        taps.append(_Edited(own, numbers, masks, writers))
        watched.append(PlaceWeights(at[numbers]))
        with taps[-1].on(model, setting.structure), attend(model, watched[-1:], verify=start == 0):
            output = setting.forward(batch)
        if takes_loss and batch.scored is not None:  # other samples are scored: masked texts, under the same edits
            with _Edited(own, numbers, masks, writers).on(model, setting.structure):
                output = setting.forward(batch.scored)
        losses.append(_mean_losses(output, batch.scored or batch) if takes_loss else _unknown(len(batch)))
        setting.progress(stage, start + len(chunk), len(rows))
    layers = {name: layer for weights in watched for name, layer in weights.layers.items()}
    loss = torch.cat(losses)
    spikes, spiked = (torch.cat([torch.stack(getattr(tap, name), 1) for tap in taps]) for name in ("spikes", "spiked"))
    weights, pulls, uniform = (
        {name: torch.cat([getattr(one, kind)[name] for one in watched]) for name in layers}
        for kind in ("weights", "pulls", "uniform")
    )

    def parts(values: Mapping[str, Tensor], own: slice) -> dict[str, Tensor]:
        return {name: value[own] for name, value in values.items()}

    by_edit = [slice(edit * count, (edit + 1) * count) for edit in range(len(edits))]
    return [
        Measured(loss[own], spikes[own], spiked[own], parts(weights, own), parts(pulls, own), parts(uniform, own), layers)
        for own in by_edit
    ]


def _takes_loss(model: nn.Module, samples: Samples) -> bool:
    """Whether samples of this kind have a loss under the model."""
    return samples.targets is not None or samples.scored is not None or loss_kind(model) == "next token"


def _unknown(samples: int) -> Tensor:
    return torch.full((samples,), float("nan"), dtype=torch.float64)


@torch.no_grad()
def clean_losses(setting: OriginSetting) -> Tensor:
    """Mean loss of every sample under the model as it is, float64 ``(samples,)``; NaN where none is taken."""
    if not _takes_loss(setting.model, setting.samples):
        return _unknown(len(setting.samples))
    scored = [batch.scored or batch for batch in setting.samples.batches(setting.batch_size)]
    return torch.cat([_mean_losses(setting.forward(batch), batch) for batch in scored])


def _mean_losses(output: object, samples: Samples) -> Tensor:
    """Mean loss of every sample over its scored positions, float64 ``(samples,)``; NaN for a sample without one."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        return _unknown(len(samples))
    own, targets = scored_pairs(logits, samples)
    scored = (targets != IGNORED).to(own.device)
    sums = cross_entropies(own, targets).double().masked_fill(~scored, 0.0).sum(1)
    return (sums / scored.sum(1)).cpu()


class _Read(Tap):
    """Reads activations of some columns of a writer."""

    def __init__(self, sublayer: Sublayer, writer: Writer, columns: Tensor, length: int) -> None:
        self.sublayer, self.writer, self.columns, self.length = sublayer, writer, columns, length
        self.read: list[Tensor] = []

    def _keep(self, values: Tensor) -> None:
        self.read.append(values.reshape(-1, self.length, len(self.columns)).float().cpu())

    def activations(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage:
            self._keep(values.detach()[..., self.columns.to(values.device)])

    def routed(self, sublayer: Sublayer, arguments: Routing, output: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage and isinstance(self.writer, Experts):
            self._keep(self.writer.read(arguments, self.columns))


@torch.no_grad()
def read_columns(setting: OriginSetting, sublayer: Sublayer, writer: Writer, columns: Tensor) -> Tensor:
    """Activations of some columns at every token, float32 ``(samples, length, columns)``."""
    tap = _Read(sublayer, writer, columns, setting.others.shape[1])
    with tap.on(setting.model, setting.structure):
        for batch in setting.samples.batches(setting.batch_size):
            setting.forward(batch)
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
        owners = torch.nonzero(others)[:, 0]
        chosen = []
        for row in torch.nonzero(at)[:, 0].tolist():
            foreign = torch.nonzero(owners != row)[:, 0]
            chosen.append(int(foreign[int(torch.randint(len(foreign), (), generator=generator))]))
        new[at] = clean[others][torch.tensor(chosen)]
    else:
        sums = (clean * at[..., None]).sum(1)
        counts = at.sum(1)[:, None].to(clean)
        rest = (sums.sum(0) - sums) / (counts.sum(0) - counts).clamp_min(1)
        new = torch.where(at[..., None], rest[:, None], new)
    return new


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """What is seen of every sample with registers; ``loss``, ``spikes`` and ``weights`` as in :class:`Measured`.

    Attributes:
        on_registers: the weight on all registers together.
        divergence, silenced: float64 ``(samples,)``: KL divergence in nats of the class probabilities from those of the model
            as it is, with registers, and with the neurons 0 at all tokens and no registers; NaN for outputs of another kind.
    """

    loss: Tensor
    spikes: Tensor
    weights: Mapping[str, Tensor]
    on_registers: Mapping[str, Tensor]
    divergence: Tensor
    silenced: Tensor


class _OnRegisters(PlaceWeights):
    name = "register_weights"


@torch.no_grad()
def measure_registers(setting: OriginSetting, at: Tensor, writer: Linear, units: list[int]) -> Moved:
    """Run a model of pictures with what some neurons write moved to registers, and without.

    Args:
        at: boolean ``(samples, length)``: the tokens of the place.

    Raises:
        UnsupportedModelError: see :func:`~sinklab.models.registers.add_registers`.
    """
    model, total, takes_loss = setting.model, len(setting.samples), _takes_loss(setting.model, setting.samples)
    seen: dict[str, list[Tensor]] = {"loss": [], "spikes": [], "divergence": [], "silenced": []}
    watched: list[tuple[PlaceWeights, PlaceWeights]] = []
    for rows in torch.arange(total).split(setting.batch_size):
        batch = setting.samples.take(rows)
        clean = setting.forward(batch)
        with hooked(_silencing(model, writer, units)):
            seen["silenced"].append(_divergence(clean, setting.forward(batch), len(rows)))
        output, spikes, watchers = _with_registers(setting, rows, at[rows], writer, units)
        seen["loss"].append(_mean_losses(output, batch) if takes_loss else _unknown(len(rows)))
        seen["divergence"].append(_divergence(clean, output, len(rows)))
        seen["spikes"].append(spikes)
        watched.append(watchers)
        setting.progress("registers", int(rows[-1]) + 1, total)
    weights, on_registers = (
        {label: torch.cat([pair[which].weights[label] for pair in watched]) for label in watched[0][which].weights}
        for which in range(2)
    )
    return Moved(weights=weights, on_registers=on_registers, **{name: torch.cat(parts) for name, parts in seen.items()})


def _with_registers(
    setting: OriginSetting, rows: Tensor, at: Tensor, writer: Linear, units: list[int]
) -> tuple[object, Tensor, tuple[PlaceWeights, PlaceWeights]]:
    """Output of the model with registers; its spikes; and the weights on the place and on the registers."""
    model, batch, masks, sizes = setting.model, setting.samples.take(rows), (at, setting.others[rows], setting.real[rows]), []
    with add_registers(model, {writer.path: units}, number=setting.registers) as registers:
        setting.forward(batch)  # which says how many tokens stand in front
        front, behind = at[:, : registers.front], at[:, registers.front :]
        added = torch.ones(len(at), registers.number, dtype=torch.bool)
        place = PlaceWeights(torch.cat((front, ~added, behind), 1))
        there = _OnRegisters(torch.cat((torch.zeros_like(front), added, torch.zeros_like(behind)), 1))

        def spikes(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            hidden = output[0] if isinstance(output, (tuple, list)) else output
            assert isinstance(hidden, Tensor)
            own = hidden if hidden.shape[1] == at.shape[1] else registers.left_out(hidden)
            sizes.append(largest_over_median(own, *masks)[0])

        def watch(handles: list[RemovableHandle]) -> None:
            names = dict.fromkeys(block.module for block in setting.structure.blocks)
            handles += [submodule(model, name).register_forward_hook(spikes) for name in names]

        with hooked(watch), attend(model, [place, there], verify=not int(rows[0])):
            output = setting.forward(batch)
    return output, torch.stack(sizes, 1), (place, there)


def _silencing(model: nn.Module, writer: Linear, units: Sequence[int]) -> Callable[[list[RemovableHandle]], None]:
    """Sets the neurons to 0 at all tokens."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].index_fill(-1, torch.tensor(units, device=args[0].device), 0.0), *args[1:])

    return lambda handles: handles.append(submodule(model, writer.path).register_forward_pre_hook(hook))


def _divergence(clean: object, changed: object, samples: int) -> Tensor:
    """KL divergence of each sample's class probabilities from those of the model as it is; NaN where there are no classes."""
    before, after = (getattr(output, "logits", None) for output in (clean, changed))
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.ndim != 2:
        return _unknown(samples)
    own, other = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (own.exp() * (own - other)).sum(-1).cpu()
