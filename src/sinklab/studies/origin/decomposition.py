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
        norm: of the mean write over samples and places.
        channels: the largest ones, as far as they make up :data:`COVERED` of the squared norm.
        parts: units in falling order, up to :data:`COVERED` of the norm together.
        rest: what is not from units: the bias.
        error: largest deviation of the sum of all parts from the norm, as a share of it.
        why: why the write is not split; empty where it is.
    """

    norm: float
    channels: list[Channel]
    parts: list[Unit]
    rest: float
    error: float
    why: str


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
    """Split the mean write of a sublayer at a place.

    Args:
        at: which tokens are the place, boolean ``(samples, length)``.
    """
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
        return Decomposition(norm, channels, [], norm, 0.0, why)
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
    parts: list[Unit] = []
    for unit in [] if why else along.argsort(descending=True)[:MOST].tolist():
        columns = writer.columns([unit])
        own = (given[:, columns] @ directions[columns] * factor).mean(0)
        parts.append(Unit(unit, f"{writer.kind} {unit}", float(along[unit]), float(own.norm()), float(own[order[0]])))
        if sum(part.along for part in parts) >= COVERED * norm:
            break
    return Decomposition(norm, channels, parts, norm if why else rest, error, why)
