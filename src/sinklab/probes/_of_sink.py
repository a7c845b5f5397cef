"""What probes of a sink share: they are given its position and do not look for it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import ClassVar, Self

from sinklab.attention.probe import Means, Probe, require_same
from sinklab.errors import ConfigurationError
from sinklab.results.metric import Metric, Row
from sinklab.sinks import Sinks

__all__ = ["SinkProbe"]


class SinkProbe(Probe):
    """Means by head of numbers about the main sink; the column ``sink`` of their rows says which that is.

    Args:
        sink_position: position of the sink inside each document; 0 is the first token.

    Raises:
        ConfigurationError: a position below 0, which no document has: positions are not counted from the end.

    Attributes:
        sinks: what was found (:meth:`about`), or the position that was named.
        asked: the same; position 0 where no sink was found, which the rows then say.
    """

    apart: ClassVar[frozenset[Metric]] = frozenset()
    """Metrics that are about no sink."""

    def __init__(self, sink_position: int = 0) -> None:
        if sink_position < 0:
            raise ConfigurationError(f"sink_position {sink_position} must be 0 or more: positions count from the first token")
        self.sinks = self.asked = Sinks.at(sink_position)
        self._means = Means("head")

    @property
    def sink_position(self) -> int | str:
        """Place that the numbers are about: a position, ``"null"``, or ``"token 198"``."""
        return self.asked.require().place

    def about(self, sinks: Sinks) -> Self:
        """The same probe, with the sinks that were found."""
        self.sinks = sinks
        self.asked = sinks if sinks.main else Sinks.at(0)
        return self

    def merge(self, other: Self) -> None:
        require_same(self, other, "sink_position")
        self._means.merge(other._means)

    def rows(self) -> Iterator[Row]:
        sink = self.sinks.describe() if self.sinks.main else f"{self.asked.describe()} (no sink was found)"
        for row in chain(self._means.pooled(), self._means.rows()):
            yield row if row["metric"] in self.apart else row | {"sink": sink}
