"""How much attention each position receives: the mean of its column over the queries that see it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import ClassVar

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.positions import by_position
from sinklab.attention.probe import Means, filled
from sinklab.probes._shared import MeanProbe
from sinklab.registry import probes
from sinklab.results.metric import Metric, Row

MEAN_WEIGHT = Metric(
    "mean_weight",
    "weight",
    "Mean attention weight on the key at this position, over the counted queries that see it, all documents together; "
    "the weight itself, not divided by the row sum.",
    paper="Gu et al. 2024 (arXiv 2410.10781)",
)
DIFFERENCE_WEIGHT = Metric(
    "difference_weight",
    "weight",
    "Of differential attention, by pair of heads: mean_weight of the first less lambda times that of the second, which is "
    "subtracted from it; rows sum to 1 - lambda.",
    paper="Ye et al. 2024 (arXiv 2410.05258)",
)
DEPTH_WEIGHT = Metric(
    "depth_weight",
    "weight",
    "Mean weight of attention over depth on the block that key_position counts, over tokens; 0 is the embeddings, the last the "
    "block that is being made.",
    range=(0.0, 1.0),
)
DEPTH_RATE = Metric(
    "depth_rate", "percent", "Percent of (token, learned query) whose weight on that block is above 0.3.", range=(0.0, 100.0)
)


@probes.register("attention_received")
class AttentionReceived(MeanProbe):
    """Mean weight on each key position, per layer and head, over all queries that see the key, of all documents.

    The column mean is Gu et al.'s importance of a token (2024, arXiv 2410.10781), here averaged and not thresholded.
    Attention of a model over its own earlier blocks (Inkling 2) is a part of its own, ``depth``, with metrics of its own.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"columns", "depth"})
    metrics: ClassVar[tuple[Metric, ...]] = (MEAN_WEIGHT, DIFFERENCE_WEIGHT, DEPTH_WEIGHT, DEPTH_RATE)

    def __init__(self) -> None:
        super().__init__()
        self._depth = Means("head", "key_position")

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        column_sum, column_count = filled(statistics, "column_sum", "column_count")
        sums = by_position(column_sum, call.key_positions)
        counts = by_position(column_count.expand_as(column_sum), call.key_positions)
        if call.site.part == "depth":
            self._depth.add(DEPTH_WEIGHT, call.site, sums, counts)
            above = 100.0 * (column_sum > 0.3)  # of one query, padding has 0
            self._depth.add(DEPTH_RATE, call.site, by_position(above, call.key_positions), counts)
            return
        self._means.add(MEAN_WEIGHT, call.site, sums, counts)
        if call.subtracted is not None:
            first, second = sums.chunk(2)
            self._means.add(DIFFERENCE_WEIGHT, call.site, first - call.subtracted * second, counts.chunk(2)[0])

    def rows(self) -> Iterator[Row]:
        return chain(self._means.rows(), self._depth.pooled(), self._depth.rows())
