"""Ablation: units silenced, set to a mean or to another sample's value, and what attention, spikes and loss do then.

Many edits run side by side, each on its own copy of some samples in one batch, so that a small model costs few forwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from sinklab.attention.session import attend
from sinklab.corpora.samples import Samples
from sinklab.models.losses import IGNORED, cross_entropies, loss_kind
from sinklab.results.run import Progress
from sinklab.studies.measure.probing import scored_pairs
from sinklab.studies.origin.structure import Structure, Sublayer
from sinklab.studies.origin.tap import Tap
from sinklab.studies.origin.tracing import PlaceWeights, largest_over_median
from sinklab.studies.origin.writers import Experts, Routing, Writer

__all__ = ["MODES", "Edit", "Measured", "mean_losses", "new_values", "read_columns", "run_edits", "takes_loss"]

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
