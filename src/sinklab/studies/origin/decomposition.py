"""Decomposition: a write at a place as a sum over the units of its writer (neurons, heads, neurons of experts), checked.

A writer is the linear map at the end of a sublayer, or the experts of a mixture: it writes ``bias + sum over columns of
activation · direction``, and a unit is one column or several.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sinklab.attention.modules import linear_map, named_modules, weight_of
from sinklab.studies.origin.found import Channel, Unit, Weight
from sinklab.studies.origin.structure import Sublayer, Tap, is_experts, is_linear
from sinklab.studies.origin.tracing import OriginSetting

__all__ = ["Decomposition", "Experts", "Linear", "Routing", "Writer", "decompose", "writer_of"]

COVERED, MOST = 0.9, 8
"""Units are named until they write this share of the whole, and no more than so many."""

CHANNELS = 5
"""Channels that are listed at most: those that make up most of the squared norm of the write."""

EXACT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""By how much of the write the parts may miss it in sum: they are added in another order than by the product itself, whose
rounding grows with the number of terms (of half precision each write has three digits at most)."""

Routing = tuple[Tensor, Tensor, Tensor]
"""Tokens ``(tokens, width)``, numbers of their experts and the weights of these, ``(tokens, chosen)``."""


class Writer(abc.ABC):
    """What a sublayer writes, by units.

    Attributes:
        path: qualified name of the map, or of the experts.
        kind: what a unit is: ``neuron``, ``head`` or ``expert neuron``.
        units, size: how many there are, and columns of each.
    """

    path: str
    kind: str
    units: int
    size: int = 1

    @abc.abstractmethod
    def name(self, unit: int) -> str:
        """The unit in words: ``neuron 233``."""

    @abc.abstractmethod
    def along(self, activations: Tensor, vectors: Tensor) -> Tensor:
        """Products, ``(tokens, units)``, of writes at activations ``(tokens, columns)`` with ``(tokens or 1, width)``."""

    @abc.abstractmethod
    def directions(self, columns: Tensor) -> Tensor:
        """What some columns write at an activation of 1, ``(columns, width)``."""

    @abc.abstractmethod
    def weights(self, unit: int) -> list[Weight]:
        """The weights behind a unit."""

    def bias(self) -> Tensor | None:
        """What is written whatever the activations, ``(width,)``."""
        return None

    def columns(self, units: Sequence[int]) -> Tensor:
        """Numbers of the columns of some units, int64."""
        return torch.tensor([unit * self.size + inner for unit in units for inner in range(self.size)], dtype=torch.int64)


class Linear(Writer):
    """A linear map; of attention its inputs are heads side by side.

    Args:
        path, module: of the map.
        weight: with which it acts, as :func:`~sinklab.attention.modules.weight_of` has it.
        heads: of the attention in front of it; ``None`` for neurons.
        readers: linear maps of the same sublayer that give the neurons, by qualified name.
    """

    def __init__(self, path: str, module: nn.Module, weight: Tensor, heads: int | None, readers: dict[str, nn.Module]) -> None:
        self.path, self.module, self.readers = path, module, readers
        self._weight = weight.T  # (columns, width)
        columns = self._weight.shape[0]
        self.kind = "neuron" if heads is None else "head"
        self.units = heads or columns
        self.size = columns // self.units

    def name(self, unit: int) -> str:
        return f"{self.kind} {unit}"

    def along(self, activations: Tensor, vectors: Tensor) -> Tensor:
        weight = self._weight.to(activations.dtype)
        products = activations * (vectors.to(activations.dtype) @ weight.T)
        return products.unflatten(1, (self.units, self.size)).sum(-1)

    def directions(self, columns: Tensor) -> Tensor:
        return self._weight[columns.to(self._weight.device)]

    def bias(self) -> Tensor | None:
        bias = getattr(linear_map(self.module), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    def weights(self, unit: int) -> list[Weight]:
        whole, name = self._weight, f"{self.path}.weight"
        column = f"{unit}" if self.kind == "neuron" else f"{unit * self.size}:{(unit + 1) * self.size}"
        if self.kind == "head":
            whole = whole.unflatten(0, (self.units, self.size)).flatten(1)
        part = f"[{column}]" if isinstance(linear_map(self.module), Conv1D) else f"[:, {column}]"
        weights = [_weight(unit, name, part, "writes", whole, unit)]
        for name, module in self.readers.items():
            rows = weight_of(module)
            for row in range(unit, 0 if rows is None else len(rows), self.units):  # fused gate and up: in both halves
                assert rows is not None
                part = f"[:, {row}]" if isinstance(linear_map(module), Conv1D) else f"[{row}]"
                weights.append(_weight(unit, f"{name}.weight", part, "reads", rows, row))
        return weights


class Experts(Writer):
    """Experts of a mixture that keep their weights in two parameters with a row for each; a unit is a neuron of an expert.

    The activation of a unit is what the expert computes times the weight that the router gives it, 0 where it is not chosen.
    """

    kind = "expert neuron"

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        down, up = module.down_proj, module.gate_up_proj
        assert isinstance(down, Tensor)
        assert isinstance(up, Tensor)
        biased = getattr(module, "down_proj_bias", None)
        self._down_bias = biased.detach() if isinstance(biased, Tensor) else None
        # (experts, inputs, outputs) in gpt-oss, (experts, outputs, inputs) elsewhere; the smaller of the two sizes of the first
        # map that is twice a size of the second says which.
        straight = up.shape[1] == 2 * down.shape[2]
        self.straight = not getattr(module, "is_transposed", not straight)
        self.inner = down.shape[2] if self.straight else down.shape[1]
        self.units = down.shape[0] * self.inner

    def name(self, unit: int) -> str:
        return f"neuron {unit % self.inner} of expert {unit // self.inner}"

    def _down(self, expert: int) -> Tensor:
        down = self.module.down_proj
        assert isinstance(down, Tensor)
        return down[expert].detach().T if self.straight else down[expert].detach()  # (inner, width)

    def _parts(self, routing: Routing) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Every expert that is chosen: its number, its tokens, their weights ``(n, 1)`` and activations ``(n, inner)``."""
        tokens, chosen, weights = routing
        tokens = tokens.flatten(0, -2)
        up, up_bias = self.module.gate_up_proj, getattr(self.module, "gate_up_proj_bias", None)
        assert isinstance(up, Tensor)
        for expert in chosen.unique().tolist():
            if not 0 <= expert < len(up):
                continue
            row, which = torch.where(chosen == expert)
            both = tokens[row] @ (up[expert].T if self.straight else up[expert])
            both = both if up_bias is None else both + up_bias[expert]
            if hasattr(self.module, "_apply_gate"):
                values = cast(Callable[[Tensor], Tensor], self.module._apply_gate)(both)
            else:
                gate, value = both.chunk(2, dim=-1)
                values = cast(Callable[[Tensor], Tensor], self.module.act_fn)(gate) * value
            yield expert, row, weights[row, which, None], values

    def read(self, routing: Routing, columns: Tensor) -> Tensor:
        """Activations of some units, ``(tokens, columns)``."""
        tokens = routing[0].flatten(0, -2)
        read = tokens.new_zeros(len(tokens), len(columns))
        for expert, row, weight, values in self._parts(routing):
            places = torch.nonzero(columns // self.inner == expert)[:, 0].to(tokens.device)
            own = columns.to(tokens.device)[places] % self.inner
            read[row[:, None], places] += weight * values[:, own]
        return read

    def biases(self, routing: Routing) -> Tensor:
        """What the biases of the chosen experts write, ``(tokens, width)``."""
        tokens = routing[0].flatten(0, -2)
        written = torch.zeros_like(tokens)
        if self._down_bias is not None:
            for expert, row, weight, _ in self._parts(routing):
                written[row] += weight * self._down_bias[expert]
        return written

    def along(self, activations: Tensor, vectors: Tensor) -> Tensor:
        products = torch.empty_like(activations)
        for expert in range(self.units // self.inner):
            own = slice(expert * self.inner, (expert + 1) * self.inner)
            down = self._down(expert).to(activations.dtype)
            products[:, own] = activations[:, own] * (vectors.to(activations.dtype) @ down.T)
        return products

    def directions(self, columns: Tensor) -> Tensor:
        return torch.stack([self._down(column // self.inner)[column % self.inner] for column in columns.tolist()])

    def weights(self, unit: int) -> list[Weight]:
        expert, neuron = divmod(unit, self.inner)
        part = f"[{expert}, :, {neuron}]" if self.straight else f"[{expert}, {neuron}]"
        return [_weight(unit, f"{self.path}.down_proj", part, "writes", self._down(expert), neuron)]


def _weight(unit: int, name: str, part: str, role: Literal["writes", "reads"], rows: Tensor, row: int) -> Weight:
    """A row of ``(rows, width)`` as the weight behind a unit."""
    norms, own = rows.float().norm(dim=1), rows[row].float()
    channel = int(own.abs().argmax())
    rank = int((rows.float().abs() >= own[channel].abs()).sum())
    median = float(norms.median())
    times = float(norms[row]) / median if median else None
    return Weight(unit, name, part, role, float(norms[row]), times, channel, float(own[channel]), rank)


def writer_of(model: nn.Module, sublayer: Sublayer, heads: int | None) -> Writer | None:
    """The writer of a sublayer; ``None`` where its write is not the rescaled output of one linear map or of known experts.

    Args:
        heads: of the attention module, for a sublayer of attention.
    """
    if sublayer.writer is None:
        return None
    modules = dict(named_modules(model))
    module = modules[sublayer.writer]
    if is_experts(module):
        return Experts(sublayer.writer, module)
    weight = weight_of(module)
    if weight is None:  # adapters do other than add to it
        return None
    width, columns = weight.shape
    if sublayer.kind != "mlp":
        return Linear(sublayer.writer, module, weight, heads, {}) if heads and not columns % heads else None
    readers = {
        name: other
        for name, other in modules.items()
        if name != sublayer.writer and is_linear(other) and _reads(other, width, columns) and _beside(name, sublayer.writer)
    }
    return Linear(sublayer.writer, module, weight, None, readers)


def _reads(module: nn.Module, width: int, columns: int) -> bool:
    """Whether a linear map takes hidden states and gives the neurons, or gate and neurons in one."""
    core = linear_map(module)
    assert core is not None
    inputs, outputs = core.weight.shape if isinstance(core, Conv1D) else reversed(core.weight.shape)
    return inputs == width and outputs in (columns, 2 * columns)


def _beside(name: str, writer: str) -> bool:
    """Whether two maps lie in one MLP: side by side, or as ``intermediate.dense`` and ``output.dense`` of one block do."""
    own, other = name.split("."), writer.split(".")
    if len(own) == len(other) and own[:-1] == other[:-1]:
        return True
    return "intermediate" in own and "output" in other and own[:-2] == other[:-2]


@dataclasses.dataclass(frozen=True, eq=False)
class Decomposition:
    """A write at a place as a sum.

    Attributes:
        norm: of the mean write over samples and places; of the difference from other tokens where ``against_others``.
        channels: the largest ones, as far as they make up :data:`COVERED` of the squared norm.
        parts: units in falling order, up to :data:`COVERED` of the norm together.
        rest: what is not from units: bias, and of mixtures what stands beside the experts.
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


class _AtPlace(Tap):
    """Watches a write at a place and at other tokens, batch by batch."""

    def __init__(self, sublayer: Sublayer) -> None:
        self.sublayer = sublayer
        self.at = self.others = torch.zeros(0)

    def over(self, setting: OriginSetting, at: Tensor) -> None:
        """Watch all samples."""
        with self.on(setting.model, setting.structure):
            for start in range(0, len(setting.samples), setting.batch_size):
                rows = slice(start, start + setting.batch_size)
                self.at, self.others = at[rows], setting.others[rows]
                setting.forward(setting.samples.take(rows))


class _Means(_AtPlace):
    """Mean write at a place and at other tokens, and the mean at the place of what leaves the block."""

    def __init__(self, sublayer: Sublayer) -> None:
        super().__init__(sublayer)
        self.here = self.there = self.state = torch.zeros(())
        self._entered: Tensor | None = None

    def enter(self, block: int, hidden: Tensor) -> None:
        self._entered = hidden if block == self.sublayer.block and self.sublayer.kind == "block" else None

    def write(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage:
            values = sublayer.scale * values.reshape(*self.at.shape, -1)
            self.here = self.here + values[self.at.to(values.device)].double().sum(0).cpu()
            self.there = self.there + values[self.others.to(values.device)].double().sum(0).cpu()

    def leave(self, block: int, hidden: Tensor) -> None:
        if self._entered is not None:
            self.write(self.sublayer, hidden - self._entered)
            self._entered = None
        if block == self.sublayer.block:
            self.state = self.state + hidden[self.at.to(hidden.device)].double().sum(0).cpu()


class _Products(_AtPlace):
    """Products of every unit's write with a direction and with one channel, summed over a place and over the other tokens."""

    def __init__(
        self, sublayer: Sublayer, writer: Writer, direction: Tensor, channel: int, others: bool, tolerance: float
    ) -> None:
        super().__init__(sublayer)
        self.writer, self.direction, self.channel = writer, direction, channel
        self.wants_others, self.tolerance = others, tolerance
        self.sums = [torch.zeros(writer.units, dtype=torch.float64) for _ in range(4)]
        self.bias = [0.0, 0.0]
        self.misfit = 0.0
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._acts: Tensor | None = None
        self._bias: Tensor | None = None

    def size(self, unit: int) -> float:
        """L2 norm of the mean write of a unit at the place."""
        columns = self.writer.columns([unit])
        directions = self.writer.directions(columns).double()
        written = [(acts[:, columns.to(acts.device)].double() @ directions * factor) for acts, factor in self._kept]
        return float(torch.cat(written).mean(0).norm())

    def activations(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage == self.sublayer.stage:
            bias = self.writer.bias()
            self._acts = values.detach().flatten(0, -2)
            self._bias = None if bias is None else bias.expand(len(self._acts), -1)

    def routed(self, sublayer: Sublayer, arguments: Routing, output: Tensor) -> None:
        if sublayer.stage != self.sublayer.stage or not isinstance(self.writer, Experts):
            return
        chosen = torch.nonzero(self.at.flatten().to(output.device))[:, 0]
        tokens, experts, weights = (argument.flatten(0, -2)[chosen] for argument in arguments)
        own, units = (tokens, experts, weights), torch.arange(self.writer.units)
        read, bias = self.writer.read(own, units), self.writer.biases(own)
        total = bias.double()
        for columns in units.split(self.writer.inner):  # of one expert
            total += read[:, columns].double() @ self.writer.directions(columns).double()
        flat = output.flatten(0, -2)
        real = flat[chosen].double()
        self.misfit = max(self.misfit, float((total - real).norm() / real.norm().clamp_min(1e-30)))
        self._acts = read.new_zeros(len(flat), self.writer.units)
        self._acts[chosen] = read
        self._bias = torch.zeros_like(flat)
        self._bias[chosen] = bias

    def write(self, sublayer: Sublayer, values: Tensor) -> None:
        if sublayer.stage != self.sublayer.stage or self._acts is None:
            return
        flat = sublayer.scale * values.detach().flatten(0, -2).double()
        basis = torch.zeros(1, flat.shape[1], dtype=torch.float64, device=flat.device)
        basis[0, self.channel] = 1.0
        direction = self.direction.to(flat.device)[None]
        for number, mask in enumerate((self.at, self.others)[: 2 if self.wants_others else 1]):
            rows = torch.nonzero(mask.flatten().to(flat.device))[:, 0]
            acts = self._acts[rows].double()
            factor = self._factor(flat[rows], acts, rows)
            if number == 0:
                self._kept.append((self._acts[rows], factor))
            self.sums[2 * number] += self.writer.along(acts, factor * direction).sum(0).cpu()
            self.sums[2 * number + 1] += self.writer.along(acts, factor * basis).sum(0).cpu()
            if self._bias is not None:
                self.bias[number] += float((self._bias[rows].double() * factor * direction).sum())
        self._acts = None

    def _factor(self, written: Tensor, acts: Tensor, rows: Tensor) -> Tensor:
        """What the output of the map is multiplied with on its way into the residual stream, ``(tokens, width)``."""
        scale = self.sublayer.scale
        if isinstance(self.writer, Experts):
            return torch.full_like(written, scale)
        plain = acts @ self.writer.directions(torch.arange(acts.shape[1])).double()
        plain = plain if self._bias is None else plain + self._bias[rows].double()
        if float((written - scale * plain).norm()) <= self.tolerance * float(written.norm()):
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
    numbers = [max(int(mask.sum()), 1) for mask in (at, setting.others)]
    means = _Means(sublayer)
    means.over(setting, at)
    here, there, state = means.here / numbers[0], means.there / numbers[1], means.state / numbers[0]
    mean = here - there if against_others else here
    norm = float(mean.norm())
    shares = mean.square() / max(norm**2, 1e-300)
    order = shares.argsort(descending=True)[:CHANNELS].tolist()
    enough = (rank for rank in range(1, len(order)) if float(shares[order[:rank]].sum()) >= COVERED)
    listed = order[: next(enough, len(order))]
    channels = [Channel(index, float(mean[index]), float(shares[index]), float(state[index])) for index in listed]
    if writer is None:
        why = "what it writes is not the rescaled output of one linear map, nor of experts whose weights are known"
        why = "what the block adds is not the sum of writes that are seen" if sublayer.kind == "block" else why
        return Decomposition(norm, channels, [], norm, 0.0, against_others, why)
    if isinstance(writer, Experts) and against_others:
        against_others, mean = False, here
        norm = float(mean.norm())
    tolerance = EXACT.get(next(setting.model.parameters()).dtype, 0.1)
    products = _Products(sublayer, writer, mean / max(norm, 1e-300), order[0], against_others, tolerance)
    products.over(setting, at)
    along, channel, rest = products.sums[0] / numbers[0], products.sums[1] / numbers[0], products.bias[0] / numbers[0]
    if against_others:
        along = along - products.sums[2] / numbers[1]
        channel = channel - products.sums[3] / numbers[1]
        rest -= products.bias[1] / numbers[1]
    missing = norm - float(along.sum()) - rest
    error = abs(missing) / max(norm, 1e-300)
    why = ""
    if isinstance(writer, Experts):  # what stands beside them (a shared expert) is the rest; they are checked by themselves
        error, rest = products.misfit, rest + missing
        if error > 0.01:
            why = f"{writer.path} keeps the weights of its experts in a form that is not known, so they cannot be split"
    elif error > tolerance:
        why = f"its parts sum to the write only up to {100 * error:.2g} % of it"
    parts: list[Unit] = []
    for unit in [] if why else along.argsort(descending=True)[:MOST].tolist():
        parts.append(Unit(unit, writer.name(unit), float(along[unit]), products.size(unit), float(channel[unit])))
        if sum(part.along for part in parts) >= COVERED * norm:
            break
    return Decomposition(norm, channels, parts, norm if why else rest, error, against_others, why)
