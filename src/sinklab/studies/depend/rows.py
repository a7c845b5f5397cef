"""Rows of the table for the indices of a task: of dependence for every pair of cells, and of what each cell lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.results.metric import Metric, Row
from sinklab.studies.depend.dependence import SCORE_LOST, SINK_DEPENDENCE

__all__ = ["index_rows"]


def index_rows(outcome: Mapping[str, Any], bos: int) -> Iterator[Row]:
    """Each index with both ends of its interval; one that there is not has no row.

    Args:
        outcome: an entry of ``summary.json``. Rows have the policy with the sink visible, or of what was lost that of the cell.
        bos: tokens in front at the reference.
    """
    if not outcome["grid"]:
        yield from _bounds(SINK_DEPENDENCE, outcome["dependence"], outcome["with_sinks"], bos, outcome["items"])
    for pair in outcome["grid"]:
        visible, hidden = pair["visible"], pair["hidden"]
        if pair["dependence"] is not None:
            yield from _bounds(SINK_DEPENDENCE, pair["dependence"], visible["read"], pair["bos"], outcome["items"])
        for side in (visible, hidden):
            if side is not None and "refused" not in side:
                yield from _bounds(SCORE_LOST, side["lost"], side["read"], pair["bos"], outcome["items"])


def _bounds(metric: Metric, index: Mapping[str, Any], policy: str, bos: int, items: int) -> Iterator[Row]:
    for name, value in index.items():
        if name != "refused":
            yield {
                "policy": policy,
                "bos": bos,
                "metric": metric if name == "mean" else metric.bound(name),
                "value": value,
                "count": items,
            }
