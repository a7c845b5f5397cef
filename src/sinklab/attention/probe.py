"""What a probe is: an accumulator that is shown calls and their statistics, and gives rows of the results table."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import ClassVar, Self

from sinklab.attention.call import AttentionCall, LayerOutput, Part, Statistics
from sinklab.errors import ContractError
from sinklab.results.metric import Metric, Row

__all__ = ["NEEDS", "OfPart", "Probe", "Watcher", "named_twice"]

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
    "gated_heads": "update_layer is called with the heads behind a gate of the model's own, of modules that have one",
}
"""What a probe may ask for; what no probe of a session asks for is never computed."""


class Probe(abc.ABC):
    """Accumulates over calls. State grows with layers, heads and positions, never with the square of the length.

    A probe overrides :meth:`update` or :meth:`update_layer` (or both), :meth:`merge` and :meth:`rows`. Feeding two halves of
    the samples to two probes and merging them must give the rows of one probe that saw all of them.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    metrics: ClassVar[tuple[Metric, ...]]
    """Every metric that :meth:`rows` may give."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:  # noqa: B027  optional on purpose
        """Take in one call of one attention module, with the statistics named in ``needs`` filled in."""

    def update_layer(self, output: LayerOutput) -> None:  # noqa: B027  optional on purpose
        """Take in hidden states; called only when ``needs`` names what it is called with."""

    def finish(self) -> None:  # noqa: B027  optional on purpose
        """Close sequences that were still growing (cached decoding); called when the session ends and before ``rows``."""

    @abc.abstractmethod
    def merge(self, other: Self) -> None:
        """Add what another probe of the same class and parameters has seen."""

    @abc.abstractmethod
    def rows(self) -> Iterator[Row]:
        """Rows of the long table: ``metric`` (one of ``metrics``), ``value``, ``count`` and those of ``module, layer, head,
        query_position, key_position`` that apply. ``count`` is the number of observations behind a mean, so that means can be
        merged.

        Many rows may come as one, with one-dimensional numpy arrays of one length in place of some values.
        """


class Watcher(Probe):
    """A probe that a function keeps for itself: it is read where it was made, has no rows, and is never merged."""

    metrics: ClassVar[tuple[Metric, ...]] = ()

    def merge(self, other: Self) -> None:
        """Refused: whoever made it shows it everything.

        Raises:
            ContractError: always.
        """
        raise ContractError(f"{self.name} is read where it was made and cannot be merged")

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

    def finish(self) -> None:
        self.probe.finish()

    def merge(self, other: Self) -> None:
        self.probe.merge(other.probe)

    def rows(self) -> Iterator[Row]:
        return self.probe.rows()


def named_twice(probes: Iterable[Probe]) -> str | None:
    """The name of two probes that give rows, if there is one: a row has the name of its probe and not its settings."""
    names = [probe.name for probe in probes if getattr(probe, "metrics", ())]
    return next((name for name in names if names.count(name) > 1), None)
