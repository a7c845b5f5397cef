"""What a probe is: an accumulator that is shown calls and their statistics, and gives rows; and the sums that probes share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.attention.call import AttentionCall, LayerOutput, Part, Site, Statistics
from sinklab.errors import ContractError
from sinklab.results.metric import Coordinates, Metric, Row

NEEDS: dict[str, str] = {
    "columns": "column_sum, column_share, column_count",
    "mass": "row_mass and, where it is defined, null_mass",
    "log_sum_exp": "log_sum_exp",
    "entropy": "row_entropy",
    "maximum": "row_max",
    "scores": "score_mean",
    "head_outputs": "call.head_outputs, call.residual and call.projection",
    "vectors": "call.queries, call.keys and call.values; they are NaN where only weights are known, so say that you read them",
    "hidden_states": "update_layer is called with the output of every layer and, first, with the embeddings",
    "attention_outputs": "update_layer is called with the output of every attention module",
    "depth": "update is also called with attention over the model's own blocks, of site.part 'depth': a token is a sample, a "
    "learned query a head, a block a key",
    "gated_heads": "update_layer is called with the heads behind a gate of the model's own, of modules that have one",
}
"""What a probe may ask for; what neither a probe of a session nor its proof asks for is never computed."""


class Probe(abc.ABC):
    """Accumulates over calls. State grows with layers, heads and positions, never with the square of the length.

    A probe overrides :meth:`update` or :meth:`update_layer` (or both), and :meth:`rows`. Its rows do not depend on the order
    and the batches in which the samples come.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    metrics: ClassVar[tuple[Metric, ...]]
    """Every metric that :meth:`rows` may give."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:  # noqa: B027  optional on purpose
        """Take in one call of one attention module, with the statistics named in ``needs`` filled in."""

    def update_layer(self, output: LayerOutput) -> None:  # noqa: B027  optional on purpose
        """Take in hidden states; called only when ``needs`` names what it is called with."""

    @abc.abstractmethod
    def rows(self) -> Iterator[Row]:
        """Rows of the long table: ``metric`` (one of ``metrics``), ``value``, ``count`` and those of ``module, layer, head,
        query_position, key_position`` that apply. ``count`` is the number of observations behind a mean, so that tables
        can be merged.

        Many rows may come as one, with one-dimensional numpy arrays of one length in place of some values.
        """


class Watcher(Probe):
    """A probe that a function keeps for itself: it is read where it was made and has no rows."""

    metrics: ClassVar[tuple[Metric, ...]] = ()

    def rows(self) -> Iterator[Row]:
        """None."""
        return iter(())


class OfPart(Probe):
    """A probe that sees one part of an encoder–decoder and nothing of the others: its numbers are about the sink of that part.

    Args:
        probe: that is shown the calls.
        part: of :class:`~sinklab.attention.call.Site`.
    """

    def __init__(self, probe: Probe, part: Part) -> None:
        self.probe, self.part = probe, part
        self.name, self.needs, self.metrics = probe.name, probe.needs, probe.metrics  # type: ignore[misc]  # as its own are

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.part == self.part:
            self.probe.update(call, statistics)

    def update_layer(self, output: LayerOutput) -> None:
        if output.site.part == self.part:
            self.probe.update_layer(output)

    def rows(self) -> Iterator[Row]:
        return self.probe.rows()


def named_twice(probes: Iterable[Probe]) -> str | None:
    """The name of two probes that give rows, if there is one: a row has the name of its probe and not its settings."""
    names = [probe.name for probe in probes if getattr(probe, "metrics", ())]
    return next((name for name in names if names.count(name) > 1), None)


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

    def cells(self, metric: Metric) -> Iterator[tuple[Site, Tensor, Tensor]]:
        """Site, sums and counts of one metric, module by module."""
        for (other, _, _), cell in self._cells.items():
            if other == metric:
                yield cell.site, cell.sums, cell.counts

    def rows(self) -> Iterator[Row]:
        """One row per metric, module and coordinate with at least one observation."""
        for (metric, _, _), cell in self._cells.items():
            coordinates: Coordinates = {"module": cell.site.module, "layer": cell.site.layer}
            if cell.site.part:
                coordinates["part"] = cell.site.part
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
    """Sum over the counted queries, and how many they are: float64 ``(heads,)`` twice, on the CPU.

    Args:
        values: ``(batch, heads, q_len)``; what is not counted may be anything, also not a number.
        counted: boolean, broadcastable to ``values``.
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
