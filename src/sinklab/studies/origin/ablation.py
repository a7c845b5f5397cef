"""Writes as sums over the units of their writers, checked; and units that are silenced, set to a mean or swapped."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from sinklab.attention.modules import linear_map, submodule, weight_of
from sinklab.attention.session import attend
from sinklab.corpora.samples import Samples
from sinklab.models.losses import IGNORED, LogitMap, cross_entropies, loss_kind, without_logits
from sinklab.studies.measure.probing import scored_pairs
from sinklab.studies.origin.found import Channel, Unit
from sinklab.studies.origin.structure import Sublayer, Tap
from sinklab.studies.origin.tracing import OriginSetting, PlaceWeights, largest_over_median

COVERED, MOST = 0.9, 8
"""Units are named until they write this share of the whole, and no more than so many."""

CHANNELS = 5
"""Channels that are listed at most: those that make up most of the squared norm of the write."""

EXACT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""By how much of the write the parts may miss it in sum: they are added in another order than by the product itself, whose
rounding grows with the number of terms (of half precision each write has three digits at most)."""


class Writer:
    """The linear map at the end of a sublayer, by units, ``neuron`` or ``head``; ``size`` is columns of each, and
    ``directions`` what each column writes at an activation of 1, ``(columns, width)``."""

    def __init__(self, path: str, module: nn.Module, weight: Tensor, heads: int | None) -> None:
        self.path, self.directions = path, weight.T
        bias = getattr(linear_map(module), "bias", None)
        self.bias = bias.detach() if isinstance(bias, Tensor) else None
        columns = len(self.directions)
        self.kind = "neuron" if heads is None else "head"
        self.units = heads or columns
        self.size = columns // self.units

    def along(self, activations: Tensor, vectors: Tensor) -> Tensor:
        """Products, ``(tokens, units)``, of writes at activations ``(tokens, columns)`` with ``(tokens or 1, width)``."""
        products = activations * (vectors.to(activations.dtype) @ self.directions.to(activations.dtype).T)
        return products.unflatten(1, (self.units, self.size)).sum(-1)

    def columns(self, units: Sequence[int]) -> Tensor:
        """Numbers of the columns of some units, int64."""
        return torch.tensor([unit * self.size + inner for unit in units for inner in range(self.size)], dtype=torch.int64)


def writer_of(model: nn.Module, sublayer: Sublayer, heads: int | None) -> Writer | None:
    """The writer of a sublayer, of attention with so many heads; ``None`` where its write is not the rescaled output of one
    linear map."""
    if sublayer.writer is None:
        return None
    module = submodule(model, sublayer.writer)
    weight = weight_of(module)
    if weight is None:  # adapters do other than add to it
        return None
    if sublayer.kind == "mlp":
        return Writer(sublayer.writer, module, weight, None)
    return Writer(sublayer.writer, module, weight, heads) if heads and not weight.shape[1] % heads else None


@dataclasses.dataclass(frozen=True, eq=False)
class Decomposition:
    """A write at a place as a sum; fields as in :class:`~sinklab.studies.origin.found.Origin`, of a place without a write
    none.

    ``norm`` is of the mean write over samples and places; ``channels`` and ``units`` are the largest, up to :data:`COVERED` of
    its square and of itself; ``rest`` is not from units: the bias; ``error`` the deviation of the sum of all parts, as a share
    of it."""

    norm: float | None = None
    channels: list[Channel] = dataclasses.field(default_factory=list)
    unit_kind: str | None = None
    units: list[Unit] = dataclasses.field(default_factory=list)
    rest: float | None = None
    error: float | None = None
    not_split: str = ""


class _Seen(Tap):
    """Keeps what a sublayer is given and writes at the tokens of a place, and what leaves its block there."""

    def __init__(self, sublayer: Sublayer, at: Tensor) -> None:
        self.sublayer, self.at = sublayer, at
        self.given, self.written, self.state = list[Tensor](), list[Tensor](), list[Tensor]()
        self._start, self._entered = 0, torch.zeros(0)

    def _here(self, values: Tensor) -> Tensor:
        """The tokens of the place, ``(tokens, width)``, of the samples at hand."""
        rows = values.detach().reshape(-1, self.at.shape[1], values.shape[-1])
        return rows[self.at[self._start : self._start + len(rows)].to(rows.device)].double().cpu()

    def enter(self, block: int, hidden: Tensor) -> None:
        self._entered = hidden if block == self.sublayer.block else self._entered

    def activations(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage:
            self.given.append(self._here(values))

    def write(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage:
            self.written.append(sublayer.scale * self._here(values))

    def leave(self, block: int, hidden: Tensor) -> None:
        if block == self.sublayer.block:
            if self.sublayer.kind == "block":
                self.write(self.sublayer, hidden - self._entered)
            self.state.append(self._here(hidden))
            self._start += len(hidden)


@torch.no_grad()
def decompose(setting: OriginSetting, sublayer: Sublayer, writer: Writer | None, at: Tensor) -> Decomposition:
    """Split the mean write of a sublayer at a place, the tokens ``at``, boolean ``(samples, length)``."""
    seen = _Seen(sublayer, at)
    setting.run(seen, sublayer.block)
    written = torch.cat(seen.written)
    mean, state = written.mean(0), torch.cat(seen.state).mean(0)
    norm = float(mean.norm())
    shares = mean.square() / max(norm**2, 1e-300)
    order = shares.argsort(descending=True)[:CHANNELS].tolist()
    enough = (rank for rank in range(1, len(order)) if float(shares[order[:rank]].sum()) >= COVERED)
    listed = order[: next(enough, len(order))]
    channels = [Channel(index, float(mean[index]), float(shares[index]), float(state[index])) for index in listed]
    if writer is None:
        why = "what it writes is not the rescaled output of one linear map"
        why = "what the block adds is not the sum of writes that are seen" if sublayer.kind == "block" else why
        return Decomposition(norm, channels, None, [], norm, 0.0, why)
    given, directions = torch.cat(seen.given), writer.directions.double().cpu()
    bias = torch.zeros_like(mean) if writer.bias is None else writer.bias.double().cpu()
    plain, factor = given @ directions + bias, torch.full_like(written, sublayer.scale)
    tolerance = EXACT.get(next(setting.model.parameters()).dtype, 0.1)
    if float((written - factor * plain).norm()) > tolerance * float(written.norm()):
        # A norm or a scale behind the map, which the structure has shown to be a factor for every token and channel.
        factor = torch.where(plain != 0, written / plain.where(plain != 0, torch.ones_like(plain)), torch.zeros_like(plain))
    direction = mean / max(norm, 1e-300)
    along, rest = writer.along(given, factor * direction).mean(0), float((bias * factor * direction).sum(1).mean())
    error = abs(norm - float(along.sum()) - rest) / max(norm, 1e-300)
    why = "" if error <= tolerance else f"its parts sum to the write only up to {100 * error:.2g} % of it"
    units: list[Unit] = []
    for unit in [] if why else along.argsort(descending=True)[:MOST].tolist():
        columns = writer.columns([unit])
        own = (given[:, columns] @ directions[columns] * factor).mean(0)
        units.append(Unit(unit, f"{writer.kind} {unit}", float(along[unit]), float(own.norm()), float(own[order[0]])))
        if sum(one.along for one in units) >= COVERED * norm:
            break
    return Decomposition(norm, channels, writer.kind, units, norm if why else rest, error, why)


Mode = Literal["zero", "mean"]
MODES: dict[Mode, str] = {
    "zero": "activation 0 at every position",
    "mean": "at the place the mean over all other positions of all samples",
}
"""What is done with the activation of a unit."""


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """One change of the model, on ``units``, ``controls``, ``write`` or ``channels``; with nothing given none.

    ``columns`` of the writer's input in the write of that ``stage``, ``(columns,)`` or ``(samples, columns)``, become
    ``values``, ``(samples, length, columns)``, NaN to stay; or the whole ``write`` at the place becomes 0; or ``channels`` of
    what leaves a ``block`` become ``state`` at the place."""

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
    """What is seen of every sample under an edit: ``loss``, float64 ``(samples,)``, NaN where none is taken; ``spikes`` and
    ``spiked``, ``(samples, blocks)``, of what leaves each block (:func:`largest_over_median`); and by attention module what
    :class:`~sinklab.studies.origin.tracing.PlaceWeights` has."""

    loss: Tensor
    spikes: Tensor
    spiked: Tensor
    weights: Mapping[str, Tensor]
    uniform: Mapping[str, Tensor]
    layers: Mapping[str, int]


class _Edited(Tap):
    """Carries out an edit on some samples, and watches the size of the hidden states from a first block on."""

    def __init__(self, edit: Edit, rows: Tensor, masks: Sequence[Tensor], first: int = 0) -> None:
        self.edit, self.rows, self.first = edit, rows, first
        self.at, self.others, self.real = (mask[rows] for mask in masks)
        self.spikes: list[Tensor] = []
        self.spiked: list[Tensor] = []

    def activations(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        edit = self.edit
        if edit.stage != sublayer.stage or edit.columns is None or edit.values is None:
            return None
        own, new = values.reshape(*self.at.shape, -1), edit.values[self.rows].to(values)
        columns = edit.columns.expand(len(edit.values), -1)[self.rows].to(values.device)[:, None].expand_as(new)
        return own.scatter(2, columns, torch.where(new.isnan(), own.gather(2, columns), new)).reshape(values.shape)

    def write(self, sublayer: Sublayer, values: Tensor) -> Tensor | None:
        if self.edit.stage != sublayer.stage or not self.edit.write:
            return None
        return values.reshape(*self.at.shape, -1).masked_fill(self.at.to(values.device)[..., None], 0.0)

    def leave(self, block: int, hidden: Tensor) -> Tensor | None:
        if block < self.first:
            self.spikes.append(_unknown(len(self.at)))
            self.spiked.append(torch.zeros(len(self.at), dtype=torch.bool))
            return None
        edit, edited = self.edit, None
        if edit.block == block and edit.channels is not None and edit.state is not None:
            channels, at = edit.channels.to(hidden.device), self.at.to(hidden.device)[..., None]
            edited = hidden.clone()
            edited[..., channels] = torch.where(at, edit.state.to(hidden), hidden[..., channels])
        times, here = largest_over_median(hidden if edited is None else edited, self.at, self.others, self.real)
        self.spikes.append(times)
        self.spiked.append(here)
        return edited


@torch.no_grad()
def run_edits(
    setting: OriginSetting, edits: Sequence[Edit], at: Tensor, stage: str, clean: Measured | None = None
) -> list[Measured]:
    """Every edit on every sample; what an edit cannot change is taken from ``clean``, the model as it is, and not run again."""
    samples, measured = len(setting.samples), list[Measured]()
    for number, edit in enumerate(edits):

        def progress(done: int, number: int = number) -> None:
            setting.progress(stage, number * samples + done, len(edits) * samples)

        measured.append(_run_edit(setting, edit, at, clean, progress, verify=not number))
    return measured


def _run_edit(
    setting: OriginSetting, edit: Edit, at: Tensor, clean: Measured | None, progress: Callable[[int], None], *, verify: bool
) -> Measured:
    """One edit on every sample; the first forward is proved where ``verify`` says so."""
    model, samples, masks = setting.model, setting.samples, (at, setting.others, setting.real)
    takes_loss, block = _takes_loss(model, samples), edit.block
    if edit.stage >= 1:
        block = setting.structure.sublayers[edit.stage - 1].block
    first = max(block, 0) if clean is not None and setting.growth.entering else 0
    losses, taps, watched = list[Tensor](), list[_Edited](), list[PlaceWeights]()
    progress(0)
    for rows in torch.arange(len(samples)).split(setting.batch_size):
        batch = samples.take(rows)
        taps.append(_Edited(edit, rows, masks, first))
        watched.append(PlaceWeights(at[rows]))
        inside = setting.entered_at(first, rows) if first else contextlib.nullcontext()
        with without_logits(model) as head:
            with inside, taps[-1].on(model, setting.structure), attend(model, watched[-1:], verify=verify and len(taps) == 1):
                output = setting.forward(batch, scored=takes_loss and batch.scored is None)
            if takes_loss and batch.scored is not None:  # other samples are scored: masked texts, under the same edit
                with _Edited(edit, rows, masks).on(model, setting.structure):
                    output = setting.forward(batch.scored)
        losses.append(_mean_losses(output, batch.scored or batch, head) if takes_loss else _unknown(len(batch)))
        progress(int(rows[-1]) + 1)
    layers = {name: layer for weights in watched for name, layer in weights.layers.items()}
    spikes, spiked = (torch.cat([torch.stack(getattr(tap, name), 1) for tap in taps]) for name in ("spikes", "spiked"))
    weights, uniform = (
        {name: torch.cat([getattr(one, kind)[name] for one in watched]) for name in layers} for kind in ("weights", "uniform")
    )
    return Measured(torch.cat(losses), spikes, spiked, {**(clean.weights if clean else {}), **weights}, uniform, layers)


def _takes_loss(model: nn.Module, samples: Samples) -> bool:
    """Whether samples of this kind have a loss under the model."""
    return samples.targets is not None or samples.scored is not None or loss_kind(model) == "next token"


def _unknown(samples: int) -> Tensor:
    return torch.full((samples,), float("nan"), dtype=torch.float64)


def _mean_losses(output: object, samples: Samples, head: LogitMap | None) -> Tensor:
    """Mean loss of every sample over its scored positions, float64 ``(samples,)``; NaN for a sample without one."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        return _unknown(len(samples))
    own, targets = scored_pairs(logits, samples)
    if head is not None and samples.targets is None:  # of so many words losses cost as much as all blocks
        targets = targets.clone()
        targets[:, ::2] = IGNORED
    scored = (targets != IGNORED).to(own.device)
    sums = cross_entropies(own, targets, head).double().masked_fill(~scored, 0.0).sum(1)
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
    """What ``(samples, length, columns)`` of activations become; NaN where they stay. ``at`` is the place, boolean."""
    if mode == "zero":
        return torch.zeros_like(clean)
    return torch.where(at[..., None], clean[others].mean(0), torch.full_like(clean, float("nan")))
