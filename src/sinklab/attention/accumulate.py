"""Running sums that probes share: by module, by head and by position, in float64 on the CPU; merging is adding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.attention.call import LayerOutput, Part, Site, Statistics
from sinklab.errors import ConfigurationError, ContractError
from sinklab.results.metric import Coordinates, Metric, Row

__all__ = ["Means", "by_head", "documents_of", "filled", "require_same"]


@dataclasses.dataclass
class _Cell:
    """Totals of one metric at one module, all in the shape of the axes."""

    site: Site
    sums: Tensor
    counts: Tensor
    own_divisors: Tensor | None  # what the sums are divided by where that is not the count

    @property
    def divisors(self) -> Tensor:
        return self.counts if self.own_divisors is None else self.own_divisors

    def add(self, other: _Cell) -> None:
        if self.own_divisors is not None or other.own_divisors is not None:
            self.own_divisors = _plus(self.divisors, other.divisors)
        self.sums, self.counts = _plus(self.sums, other.sums), _plus(self.counts, other.counts)


class Means:
    """Means of observations on named axes, one array per metric and module; axes grow as longer sequences come.

    Args:
        axes: columns of the table that the dimensions of what is added stand for, such as ``("head", "key_position")``.
    """

    def __init__(self, *axes: str) -> None:
        self.axes = axes
        self._cells: dict[tuple[Metric, str, str], _Cell] = {}

    def add(self, metric: Metric, site: Site, sums: Tensor, counts: Tensor, divisors: Tensor | None = None) -> None:
        """Add sums and the number of observations behind them, each with one dimension per axis.

        Args:
            divisors: what the sums are divided by in the end when that is not the count: a ratio of two totals.
        """
        totals = [_wide(sums), _wide(counts)] + ([] if divisors is None else [_wide(divisors)])
        if any(total.shape != totals[0].shape for total in totals):
            totals = list(torch.broadcast_tensors(*totals))
        known = self._cells.get((metric, site.module, site.kind))
        if known is None:
            totals = [total.clone() for total in totals]
        fresh = _Cell(site, totals[0], totals[1], None if divisors is None else totals[2])
        if known is None:
            self._cells[metric, site.module, site.kind] = fresh
        else:
            known.add(fresh)

    def merge(self, other: Means) -> None:
        """Add all that another one holds."""
        for (metric, _, _), cell in other._cells.items():
            self.add(metric, cell.site, cell.sums, cell.counts, cell.own_divisors)

    def cells(self, metric: Metric) -> Iterator[tuple[Site, Tensor, Tensor]]:
        """Site, sums and counts of one metric, module by module."""
        for (other, _, _), cell in self._cells.items():
            if other == metric:
                yield cell.site, cell.sums, cell.counts

    def rows(self) -> Iterator[Row]:
        """One row per metric, module and coordinate with at least one observation."""
        for (metric, _, _), cell in self._cells.items():
            coordinates: Coordinates = {"module": cell.site.module, "layer": cell.site.layer}
            yield from _rows(metric, cell, self.axes, coordinates)

    def pooled(self) -> Iterator[Row]:
        """Rows of the whole model: all observations of all self-attention modules and heads together; of an encoder–decoder
        those of each part by themselves, cross-attention among them."""
        wholes: dict[tuple[Metric, Part], _Cell] = {}
        for (metric, _, kind), cell in self._cells.items():
            part = cell.site.part
            if kind == "self" or part:
                divisors = None if cell.own_divisors is None else cell.own_divisors.sum(0)
                summed = _Cell(cell.site, cell.sums.sum(0), cell.counts.sum(0), divisors)
                whole = wholes.setdefault((metric, part), summed)
                if whole is not summed:
                    whole.add(summed)
        for (metric, part), whole in sorted(wholes.items(), key=lambda item: [known for known, _ in wholes].index(item[0][0])):
            yield from _rows(metric, whole, self.axes[1:], {"part": part} if part else {})


def by_head(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the counted queries, and how many they are.

    Args:
        values: ``(batch, heads, q_len)``; what is not counted may be anything, also not a number.
        counted: boolean, broadcastable to ``values``.

    Returns:
        float64 ``(heads,)`` twice, on the CPU.
    """
    counted = counted.cpu().expand(values.shape)
    return _wide(values).masked_fill(~counted, 0.0).sum((0, 2)), counted.sum((0, 2)).double()


def documents_of(output: LayerOutput) -> Iterator[tuple[int, Tensor]]:
    """Batch row and boolean ``(seq_len,)`` of the tokens of each document; padding belongs to none."""
    for row, documents in enumerate(output.documents):
        for document in documents[documents >= 0].unique().tolist():
            yield row, documents == document


def filled(statistics: Statistics, *names: str) -> list[Tensor]:
    """The named statistics, which the probe's ``needs`` asked for.

    Raises:
        ContractError: one of them was not computed.
    """
    missing = [name for name in names if getattr(statistics, name) is None]
    if missing:
        raise ContractError(f"a probe was shown a call without {', '.join(missing)}; give it what its needs name")
    return [getattr(statistics, name) for name in names]


def require_same(mine: object, other: object, *parameters: str) -> None:
    """Refuse to merge two probes that measure different things.

    Raises:
        ConfigurationError: another class, or another value of a parameter.
    """
    if type(mine) is not type(other):
        raise ConfigurationError(f"a {type(mine).__name__} cannot merge a {type(other).__name__}")
    for name in parameters:
        here, there = getattr(mine, name), getattr(other, name)
        if here != there:
            raise ConfigurationError(f"two {type(mine).__name__} with {name} {here} and {there} measure different things")


def _wide(values: Tensor) -> Tensor:
    # To the CPU first: some devices have no float64.
    values = values.detach()
    return (values if values.device.type == "cpu" else values.cpu()).double()


def _plus(left: Tensor, right: Tensor) -> Tensor:
    if left.shape == right.shape:
        return left + right
    shape = [max(sizes) for sizes in zip(left.shape, right.shape, strict=True)]
    return _padded(left, shape) + _padded(right, shape)


def _padded(values: Tensor, shape: list[int]) -> Tensor:
    missing = [amount for have, want in zip(values.shape, shape, strict=True) for amount in (want - have, 0)]
    return pad(values, missing[::-1])


def _rows(metric: Metric, cell: _Cell, axes: tuple[str, ...], coordinates: Coordinates) -> Iterator[Row]:
    seen = (cell.counts > 0) & (cell.divisors > 0)
    values, numbers = cell.sums[seen] / cell.divisors[seen], cell.counts[seen].long()
    if not axes:
        for value, count in zip(values.tolist(), numbers.tolist(), strict=True):
            yield {"metric": metric, "value": value, "count": count, **coordinates}
    elif len(values):
        # All rows of a cell at once: a long text gives hundreds of thousands.
        index = {axis: index.numpy() for axis, index in zip(axes, torch.nonzero(seen, as_tuple=True), strict=True)}
        where = cast(Coordinates, index)  # axes are names of columns
        yield {"metric": metric, "value": values.numpy(), "count": numbers.numpy(), **coordinates, **where}
