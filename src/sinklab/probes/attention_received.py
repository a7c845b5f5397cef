"""How much attention each position receives: the mean of its column over the queries that see it."""

from __future__ import annotations

from typing import ClassVar

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.positions import by_position
from sinklab.attention.probe import filled
from sinklab.probes._shared import MeanProbe
from sinklab.registry import probes
from sinklab.results.metric import Metric

MEAN_WEIGHT = Metric(
    "mean_weight",
    "weight",
    "Mean attention weight on the key at this position, over the counted queries that see it, all documents together; "
    "the weight itself, not divided by the row sum.",
    paper="Gu et al. 2024 (arXiv 2410.10781)",
)


@probes.register("attention_received")
class AttentionReceived(MeanProbe):
    """Mean weight on each key position, per layer and head, over all queries that see the key, of all documents.

    The column mean is Gu et al.'s importance of a token (2024, arXiv 2410.10781), here averaged and not thresholded.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"columns"})
    metrics: ClassVar[tuple[Metric, ...]] = (MEAN_WEIGHT,)

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        column_sum, column_count = filled(statistics, "column_sum", "column_count")
        sums = by_position(column_sum, call.key_positions)
        counts = by_position(column_count.expand_as(column_sum), call.key_positions)
        self._means.add(MEAN_WEIGHT, call.site, sums, counts)
