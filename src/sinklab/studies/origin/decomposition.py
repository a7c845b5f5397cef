"""Decomposition: a write at a place as a sum over the units of its writer (neurons or heads), checked.

A writer is the linear map at the end of a sublayer: it writes ``bias + sum over columns of activation · direction``, and a unit
is one column or several.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sinklab.attention.modules import linear_map, submodule, weight_of
from sinklab.studies.origin.found import Channel, Unit
from sinklab.studies.origin.structure import Sublayer, Tap
from sinklab.studies.origin.tracing import OriginSetting

__all__ = ["Decomposition", "Writer", "decompose", "writer_of"]

COVERED, MOST = 0.9, 8
"""Units are named until they write this share of the whole, and no more than so many."""

CHANNELS = 5
"""Channels that are listed at most: those that make up most of the squared norm of the write."""

EXACT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""By how much of the write the parts may miss it in sum: they are added in another order than by the product itself, whose
rounding grows with the number of terms (of half precision each write has three digits at most)."""


class Writer:
    """The linear map at the end of a sublayer, by units; of attention its inputs are heads side by side.

    Attributes:
        path: qualified name of the map.
        kind: what a unit is: ``neuron`` or ``head``.
        units, size: how many there are, and columns of each.
        directions: what each column writes at an activation of 1, ``(columns, width)``.

    Args:
        path, module: of the map.
        weight: with which it acts, as :func:`~sinklab.attention.modules.weight_of` has it.
        heads: of the attention in front of it; ``None`` for neurons.
    """

    def __init__(self, path: str, module: nn.Module, weight: Tensor, heads: int | None) -> None:
        self.path, self.directions = path, weight.T
        bias = getattr(linear_map(module), "bias", None)
        self.bias = bias.detach() if isinstance(bias, Tensor) else None
        columns = len(self.directions)
        self.kind = "neuron" if heads is None else "head"
        self.units = heads or columns
        self.size = columns // self.units

    def name(self, unit: int) -> str:
        """The unit in words: ``neuron 233``."""
        return f"{self.kind} {unit}"

    def along(self, activations: Tensor, vectors: Tensor) -> Tensor:
        """Products, ``(tokens, units)``, of writes at activations ``(tokens, columns)`` with ``(tokens or 1, width)``."""
        products = activations * (vectors.to(activations.dtype) @ self.directions.to(activations.dtype).T)
        return products.unflatten(1, (self.units, self.size)).sum(-1)

    def columns(self, units: Sequence[int]) -> Tensor:
        """Numbers of the columns of some units, int64."""
        return torch.tensor([unit * self.size + inner for unit in units for inner in range(self.size)], dtype=torch.int64)


def writer_of(model: nn.Module, sublayer: Sublayer, heads: int | None) -> Writer | None:
    """The writer of a sublayer; ``None`` where its write is not the rescaled output of one linear map.

    Args:
        heads: of the attention module, for a sublayer of attention.
    """
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
    """A write at a place as a sum.

    Attributes:
        norm: of the mean write over samples and places; of the difference from other tokens where ``against_others``.
        channels: the largest ones, as far as they make up :data:`COVERED` of the squared norm.
        parts: units in falling order, up to :data:`COVERED` of the norm together.
        rest: what is not from units: the bias.
        error: largest deviation of the sum of all parts from the norm, as a share of it.
        against_others: whether the mean over other tokens was subtracted.
        why: why the write is not split; empty where it is.
    """

    norm: float
    channels: list[Channel]
    parts: list[Unit]
    rest: float
    error: float
    against_others: bool
    why: str


class _Seen(Tap):
    """Keeps what a sublayer is given and writes at the tokens of some masks, and what leaves its block at those of the first."""

    def __init__(self, sublayer: Sublayer, masks: Sequence[Tensor]) -> None:
        self.sublayer, self.masks = sublayer, masks
        self.given: list[list[Tensor]] = [[] for _ in masks]
        self.written: list[list[Tensor]] = [[] for _ in masks]
        self.state: list[Tensor] = []
        self._start = 0
        self._entered = torch.zeros(0)

    def _at(self, values: Tensor, which: int) -> Tensor:
        """The tokens of a mask, ``(tokens, width)``, of the samples at hand."""
        length = self.masks[which].shape[1]
        rows = values.detach().reshape(-1, length, values.shape[-1])
        return rows[self.masks[which][self._start : self._start + len(rows)].to(rows.device)].double().cpu()

    def enter(self, block: int, hidden: Tensor) -> None:
        self._entered = hidden if block == self.sublayer.block else self._entered

    def activations(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage:
            for which, given in enumerate(self.given):
                given.append(self._at(values, which))

    def write(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage:
            for which, written in enumerate(self.written):
                written.append(sublayer.scale * self._at(values, which))

    def leave(self, block: int, hidden: Tensor) -> None:
        if block == self.sublayer.block:
            if self.sublayer.kind == "block":
                self.write(self.sublayer, hidden - self._entered)
            self.state.append(self._at(hidden, 0))
            self._start += len(hidden)


def _factor(writer: Writer, given: Tensor, written: Tensor, scale: float, tolerance: float) -> Tensor:
    """What the output of the map is multiplied with on its way into the residual stream, ``(tokens, width)``."""
    plain = given @ writer.directions.double().cpu()
    plain = plain if writer.bias is None else plain + writer.bias.double().cpu()
    if float((written - scale * plain).norm()) <= tolerance * float(written.norm()):
        return torch.full_like(written, scale)
    # A norm or a scale behind the map, which the structure has shown to be a factor for every token and channel.
    return torch.where(plain != 0, written / plain.where(plain != 0, torch.ones_like(plain)), torch.zeros_like(plain))


@torch.no_grad()
def decompose(
    setting: OriginSetting, sublayer: Sublayer, writer: Writer | None, at: Tensor, *, against_others: bool
) -> Decomposition:
    """Split the mean write of a sublayer at a place.

    Args:
        at: which tokens are the place, boolean ``(samples, length)``.
        against_others: subtract the mean over the others: what makes the place differ, and not what all tokens get.
    """
    seen = _Seen(sublayer, (at, setting.others) if against_others else (at,))
    setting.run(seen, sublayer.block)
    given, written = ([torch.cat(parts) if parts else None for parts in kept] for kept in (seen.given, seen.written))
    means = [values.mean(0) for values in written if values is not None]
    mean, state = means[0] - means[1] if against_others else means[0], torch.cat(seen.state).mean(0)
    norm = float(mean.norm())
    shares = mean.square() / max(norm**2, 1e-300)
    order = shares.argsort(descending=True)[:CHANNELS].tolist()
    enough = (rank for rank in range(1, len(order)) if float(shares[order[:rank]].sum()) >= COVERED)
    listed = order[: next(enough, len(order))]
    channels = [Channel(index, float(mean[index]), float(shares[index]), float(state[index])) for index in listed]
    if writer is None:
        why = "what it writes is not the rescaled output of one linear map"
        why = "what the block adds is not the sum of writes that are seen" if sublayer.kind == "block" else why
        return Decomposition(norm, channels, [], norm, 0.0, against_others, why)
    tolerance = EXACT.get(next(setting.model.parameters()).dtype, 0.1)
    direction, basis = mean[None] / max(norm, 1e-300), torch.zeros(1, len(mean), dtype=torch.float64)
    basis[0, order[0]] = 1.0
    along, channel, rest, own = torch.zeros(()), torch.zeros(()), 0.0, list[Tensor]()
    for sign, acts, writes in zip((1.0, -1.0), given, written, strict=False):
        assert acts is not None and writes is not None
        factor = _factor(writer, acts, writes, sublayer.scale, tolerance)
        own.append(factor)
        along = along + sign * writer.along(acts, factor * direction).mean(0)
        channel = channel + sign * writer.along(acts, factor * basis).mean(0)
        if writer.bias is not None:
            rest += sign * float((writer.bias.double().cpu() * factor * direction).sum(1).mean())
    error = abs(norm - float(along.sum()) - rest) / max(norm, 1e-300)
    why = "" if error <= tolerance else f"its parts sum to the write only up to {100 * error:.2g} % of it"
    parts: list[Unit] = []
    for unit in [] if why else along.argsort(descending=True)[:MOST].tolist():
        columns = writer.columns([unit])
        size = (given[0][:, columns] @ writer.directions[columns].double().cpu() * own[0]).mean(0).norm()
        parts.append(Unit(unit, writer.name(unit), float(along[unit]), float(size), float(channel[unit])))
        if sum(part.along for part in parts) >= COVERED * norm:
            break
    return Decomposition(norm, channels, parts, norm if why else rest, error, against_others, why)
