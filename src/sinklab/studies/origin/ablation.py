"""Ablation: units silenced, set to a mean or to another sample's value, and what goes with them.

Many edits run side by side, each on its own copy of some samples in one batch, so that a small model costs few forwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from sinklab.attention.session import attend
from sinklab.corpora.samples import Samples
from sinklab.models.losses import IGNORED, cross_entropies, loss_kind
from sinklab.studies.measure.probing import scored_pairs
from sinklab.studies.origin.structure import Sublayer, Tap
from sinklab.studies.origin.tracing import OriginSetting, PlaceWeights, largest_over_median

__all__ = ["MODES", "Edit", "Measured", "Mode", "clean_losses", "new_values", "read_columns", "run_edits"]

Mode = Literal["zero", "mean", "constant"]
MODES: dict[Mode, str] = {
    "zero": "activation 0 at every position",
    "mean": "at the place the mean over all other positions of all samples",
    "constant": "at the place the mean over the other samples at the place itself",
}
"""What is done with the activation of a unit."""


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """One change of the model; with nothing given none.

    Attributes:
        name, on, what: of the change, what it is made on (``units``, ``controls``, ``write``, ``channels``), and in words.
        stage: of the write that is edited.
        columns, values: columns of the writer's input, ``(columns,)`` or ``(samples, columns)``, and what they become,
            ``(samples, length, columns)``; NaN to stay.
        write: the whole write at the place becomes 0.
        block, channels, state: channels of what leaves a block, and what they become at the place, ``(channels,)``.
    """

    name: str
    on: str = ""
    what: str = ""
    stage: int = -1
    columns: Tensor | None = None
    values: Tensor | None = None
    write: bool = False
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
        weights, uniform: by attention module, see :class:`~sinklab.studies.origin.tracing.PlaceWeights`.
        layers: running number of each attention module.
    """

    loss: Tensor
    spikes: Tensor
    spiked: Tensor
    weights: Mapping[str, Tensor]
    uniform: Mapping[str, Tensor]
    layers: Mapping[str, int]


class _Edited(Tap):
    """Carries out edits, one for every row of the batch, and watches the size of the hidden states from a first block on."""

    def __init__(self, edits: Sequence[Edit], rows: Tensor, masks: Sequence[Tensor], first: int = 0) -> None:
        self.edits, self.rows, self.first = edits, rows, first
        self.at, self.others, self.real = (mask[rows] for mask in masks)
        self.spikes: list[Tensor] = []
        self.spiked: list[Tensor] = []

    def _by_edit(self) -> Iterator[tuple[Edit, slice]]:
        start = 0
        for stop in range(1, len(self.edits) + 1):
            if stop == len(self.edits) or self.edits[stop] is not self.edits[start]:
                yield self.edits[start], slice(start, stop)
                start = stop

    def activations(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        edited = None
        for edit, rows in self._by_edit():
            if edit.stage == sublayer.stage and edit.columns is not None and edit.values is not None:
                edited = values.clone().reshape(*self.at.shape, -1) if edited is None else edited
                new = edit.values[self.rows[rows]].to(values)
                columns = edit.columns.expand(len(edit.values), -1)[self.rows[rows]].to(values.device)[:, None].expand_as(new)
                own = edited[rows]
                edited[rows] = own.scatter(2, columns, torch.where(new.isnan(), own.gather(2, columns), new))
        return None if edited is None else edited.reshape(values.shape)

    def write(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        edited = None
        for edit, rows in self._by_edit():
            if edit.stage == sublayer.stage and edit.write:
                edited = values.clone().reshape(*self.at.shape, -1) if edited is None else edited
                edited[rows] = edited[rows].masked_fill(self.at[rows].to(values.device)[..., None], 0.0)
        return edited

    def leave(self, block: int, hidden: Tensor) -> Tensor | None:
        if block < self.first:
            self.spikes.append(_unknown(len(self.at)))
            self.spiked.append(torch.zeros(len(self.at), dtype=torch.bool))
            return None
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
    setting: OriginSetting, edits: Sequence[Edit], at: Tensor, stage: str, clean: Measured | None = None
) -> list[Measured]:
    """Every edit on every sample.

    Args:
        at: boolean ``(samples, length)``: the tokens of the place.
        stage: what is said of the progress.
        clean: of the model as it is; what an edit cannot change is taken from there, and not run again.
    """
    model, samples, masks = setting.model, setting.samples, (at, setting.others, setting.real)
    takes_loss, blocks = _takes_loss(model, samples), [sublayer.block for sublayer in setting.structure.sublayers]
    rows = [(edit, sample) for edit in range(len(edits)) for sample in range(len(samples))]
    starts = [edit.block if edit.stage < 1 else blocks[edit.stage - 1] for edit in edits]
    first = max(min(starts), 0) if clean is not None and setting.growth.entering else 0
    losses, taps, watched = list[Tensor](), list[_Edited](), list[PlaceWeights]()
    setting.progress(stage, 0, len(rows))
    for start in range(0, len(rows), setting.batch_size):
        chunk = rows[start : start + setting.batch_size]
        of_rows, numbers = [edits[edit] for edit, _ in chunk], torch.tensor([sample for _, sample in chunk])
        batch = samples.take(numbers)
        taps.append(_Edited(of_rows, numbers, masks, first))
        watched.append(PlaceWeights(at[numbers]))
        inside = setting.entered_at(first, numbers) if first else contextlib.nullcontext()
        with inside, taps[-1].on(model, setting.structure), attend(model, watched[-1:], verify=start == 0):
            output = setting.forward(batch, scored=takes_loss and batch.scored is None)
        if takes_loss and batch.scored is not None:  # other samples are scored: masked texts, under the same edits
            with _Edited(of_rows, numbers, masks).on(model, setting.structure):
                output = setting.forward(batch.scored)
        losses.append(_mean_losses(output, batch.scored or batch) if takes_loss else _unknown(len(batch)))
        setting.progress(stage, start + len(chunk), len(rows))
    layers = {name: layer for weights in watched for name, layer in weights.layers.items()}
    loss = torch.cat(losses)
    spikes, spiked = (torch.cat([torch.stack(getattr(tap, name), 1) for tap in taps]) for name in ("spikes", "spiked"))
    weights, uniform = (
        {name: torch.cat([getattr(one, kind)[name] for one in watched]) for name in layers} for kind in ("weights", "uniform")
    )
    before = {} if clean is None else clean.weights
    measured = list[Measured]()
    for part in torch.arange(len(rows)).split(len(samples)):
        own = {**before, **{name: value[part] for name, value in weights.items()}}
        even = {name: value[part] for name, value in uniform.items()}
        measured.append(Measured(loss[part], spikes[part], spiked[part], own, even, layers))
    return measured


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
    """Reads some of what is given to the linear map of a write."""

    def __init__(self, stage: int, columns: Tensor, length: int) -> None:
        self.stage, self.columns, self.length = stage, columns, length
        self.read: list[Tensor] = []

    def activations(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.stage:
            chosen = values.detach()[..., self.columns.to(values.device)]
            self.read.append(chosen.reshape(-1, self.length, len(self.columns)).float().cpu())


@torch.no_grad()
def read_columns(setting: OriginSetting, sublayer: Sublayer, columns: Tensor) -> Tensor:
    """Activations of some columns at every token, float32 ``(samples, length, columns)``."""
    tap = _Read(sublayer.stage, columns, setting.others.shape[1])
    setting.run(tap, sublayer.block)
    return torch.cat(tap.read)


def new_values(mode: Mode, clean: Tensor, at: Tensor, others: Tensor) -> Tensor:
    """What the activations become, ``(samples, length, columns)``; NaN where they stay as they are.

    Args:
        clean: of the model as it is, same shape.
        at, others: which tokens are the place, and which are others, boolean ``(samples, length)``.
    """
    if mode == "zero":
        return torch.zeros_like(clean)
    here, new = at[..., None], torch.full_like(clean, float("nan"))
    if mode == "mean":
        return torch.where(here, clean[others].mean(0), new)
    sums, counts = (clean * here).sum(1), at.sum(1)[:, None].to(clean)
    rest = (sums.sum(0) - sums) / (counts.sum(0) - counts).clamp_min(1)
    return torch.where(here, rest[:, None], new)
