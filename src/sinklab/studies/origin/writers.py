"""Writers: the linear map at the end of a sublayer as a sum over its units: neurons, heads, or neurons of experts."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sinklab.attention.linear_maps import linear_map, weight_of
from sinklab.attention.names import named_modules
from sinklab.studies.origin.structure import Sublayer, is_experts, is_linear

__all__ = ["Experts", "Linear", "Routing", "Weight", "Writer", "writer_of"]

Routing = tuple[Tensor, Tensor, Tensor]
"""Tokens ``(tokens, width)``, numbers of their experts and the weights of these, ``(tokens, chosen)``."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A part of a parameter that stands behind a unit.

    Attributes:
        parameter: qualified name.
        part: ``[:, 233]``.
        role: ``writes`` or ``reads``.
        norm: L2 norm of the part.
        times_median: the same over the median norm of such parts of the parameter.
        channel, value: index and value of the largest entry by size.
        rank: how many entries of the whole parameter are as large, this one counted: 1 for the largest of all.
    """

    parameter: str
    part: str
    role: str
    norm: float
    times_median: float
    channel: int
    value: float
    rank: int


class Writer(abc.ABC):
    """What a sublayer writes as ``bias + sum over columns of activation · direction``; a unit is one column or several.

    Attributes:
        kind: what a unit is: ``neuron``, ``head`` or ``expert neuron``.
        units: how many there are.
        size: columns of a unit.
    """

    kind: str
    units: int
    size: int = 1

    @abc.abstractmethod
    def name(self, unit: int) -> str:
        """The unit in words: ``neuron 233``."""

    def columns(self, units: Sequence[int]) -> Tensor:
        """Numbers of the columns of some units, int64."""
        return torch.tensor([unit * self.size + inner for unit in units for inner in range(self.size)], dtype=torch.int64)

    @abc.abstractmethod
    def along(self, activations: Tensor, vectors: Tensor) -> Tensor:
        """Products of what every unit writes with a vector for each token: ``(tokens, units)``.

        Args:
            activations: ``(tokens, columns)``.
            vectors: ``(tokens or 1, width)``.
        """

    @abc.abstractmethod
    def directions(self, columns: Tensor) -> Tensor:
        """What some columns write at an activation of 1, ``(columns, width)``."""

    @abc.abstractmethod
    def bias(self) -> Tensor | None:
        """What is written whatever the activations, ``(width,)``."""

    @abc.abstractmethod
    def weights(self, unit: int) -> list[Weight]:
        """The weights behind a unit."""


class Linear(Writer):
    """A linear map; of attention its inputs are heads side by side.

    Args:
        name, module: of the map.
        weight: with which it acts, as :func:`~sinklab.attention.linear_maps.weight_of` has it.
        heads: of the attention in front of it; ``None`` for neurons.
        readers: linear maps of the same sublayer that give the neurons, by qualified name.
    """

    def __init__(self, name: str, module: nn.Module, weight: Tensor, heads: int | None, readers: dict[str, nn.Module]) -> None:
        self.path, self.module, self.readers = name, module, readers
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
        transposed = isinstance(linear_map(self.module), Conv1D)
        if self.kind == "head":
            part = f"{unit * self.size}:{(unit + 1) * self.size}"
            whole = self._weight.unflatten(0, (self.units, self.size)).flatten(1)
            return [_weight(f"{self.path}.weight", f"[{part}]" if transposed else f"[:, {part}]", "writes", whole, unit)]
        weights = [_weight(f"{self.path}.weight", f"[{unit}]" if transposed else f"[:, {unit}]", "writes", self._weight, unit)]
        for name, module in self.readers.items():
            rows = weight_of(module)
            if rows is None:
                continue
            for row in range(unit, len(rows), self.units):  # fused gate and up: the same neuron in both halves
                part = f"[:, {row}]" if isinstance(linear_map(module), Conv1D) else f"[{row}]"
                weights.append(_weight(f"{name}.weight", part, "reads", rows, row))
        return weights


class Experts(Writer):
    """Experts of a mixture that keep their weights in two parameters with a row for each; a unit is a neuron of an expert.

    The activation of a unit is what the expert computes times the weight that the router gives it, 0 where it is not chosen.
    """

    kind = "expert neuron"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.path, self.module = name, module
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

    def parts(self, routing: Routing) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
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

    def read(self, routing: Routing) -> Tensor:
        """Activations of all units, ``(tokens, units)``."""
        tokens = routing[0].flatten(0, -2)
        read = tokens.new_zeros(len(tokens), self.units)
        for expert, row, weight, values in self.parts(routing):
            read[row, expert * self.inner : (expert + 1) * self.inner] += weight * values
        return read

    def read_columns(self, routing: Routing, columns: Tensor) -> Tensor:
        """Activations of some units, ``(tokens, columns)``."""
        tokens = routing[0].flatten(0, -2)
        read = tokens.new_zeros(len(tokens), len(columns))
        for expert, row, weight, values in self.parts(routing):
            own = [place for place, column in enumerate(columns.tolist()) if column // self.inner == expert]
            for place in own:
                read[row, place] += weight[:, 0] * values[:, int(columns[place]) % self.inner]
        return read

    def biases(self, routing: Routing) -> Tensor:
        """What the biases of the chosen experts write, ``(tokens, width)``."""
        tokens = routing[0].flatten(0, -2)
        written = torch.zeros_like(tokens)
        if self._down_bias is not None:
            for expert, row, weight, _ in self.parts(routing):
                written[row] += weight * self._down_bias[expert]
        return written

    def along(self, activations: Tensor, vectors: Tensor) -> Tensor:
        products = torch.empty_like(activations)
        for expert in range(self.units // self.inner):
            own = slice(expert * self.inner, (expert + 1) * self.inner)
            products[:, own] = activations[:, own] * (
                vectors.to(activations.dtype) @ self._down(expert).to(activations.dtype).T
            )
        return products

    def directions(self, columns: Tensor) -> Tensor:
        return torch.stack([self._down(column // self.inner)[column % self.inner] for column in columns.tolist()])

    def bias(self) -> Tensor | None:
        return None

    def weights(self, unit: int) -> list[Weight]:
        expert, neuron = divmod(unit, self.inner)
        part = f"[{expert}, :, {neuron}]" if self.straight else f"[{expert}, {neuron}]"
        return [_weight(f"{self.path}.down_proj", part, "writes", self._down(expert), neuron)]


def _weight(name: str, part: str, role: str, rows: Tensor, row: int) -> Weight:
    """A row of ``(rows, width)`` as the weight behind a unit."""
    norms, own = rows.float().norm(dim=1), rows[row].float()
    channel = int(own.abs().argmax())
    rank = int((rows.float().abs() >= own[channel].abs()).sum())
    median = float(norms.median())
    return Weight(
        name, part, role, float(norms[row]), float(norms[row]) / median if median else float("inf"), channel,
        float(own[channel]), rank,
    )  # fmt: skip


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
