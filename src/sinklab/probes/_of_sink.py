"""What probes of a sink share: they are told where it is and do not look for it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar, Self

from sinklab.attention.probe import Probe
from sinklab.probes._accumulate import Means, require_same
from sinklab.results.metric import Metric
from sinklab.sinks import Sinks

__all__ = ["SinkProbe"]


class SinkProbe(Probe):
    """Means by head of numbers about the main sink; the column ``sink`` of their rows says which that is.

    Args:
        sink_position: position of the sink inside each document; 0 is the first token.

    Attributes:
        sinks: where the sink is; to be replaced by what was found before the probe sees its first call. Without a main sink
            there are no numbers about one.
    """

    apart: ClassVar[frozenset[Metric]] = frozenset()
    """Metrics that are about no sink."""

    def __init__(self, sink_position: int = 0) -> None:
        self.sinks = Sinks.at(sink_position)
        self._means = Means("head")

    @property
    def sink_position(self) -> int | str | None:
        """Place of the main sink: a position, ``"null"``, ``"token 198"``, or ``None``."""
        return self.sinks.main.place if self.sinks.main else None

    def merge(self, other: Self) -> None:
        require_same(self, other, "sink_position")
        self._means.merge(other._means)

    def rows(self) -> Iterator[dict[str, Any]]:
        for row in chain(self._means.pooled(), self._means.rows()):
            yield row if row["metric"] in self.apart else row | {"sink": self.sinks.describe()}
