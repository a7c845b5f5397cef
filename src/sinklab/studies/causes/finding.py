"""Results of experiments on causes: numbers and a sentence about them, as JSON and as rows of the long table."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat, Unpack

import numpy as np
from torch import Tensor

from sinklab.results.intervals import Interval
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row
from sinklab.results.summaries.shared import Difference
from sinklab.sinks import Head

__all__ = ["LOSS_CHANGE", "SINK_SHARE", "ExperimentResult", "bounds", "head_rows", "interval_rows", "number", "plain", "signed"]

LOSS_CHANGE = Metric("loss_change", "nats", "Mean over texts of the change of their mean loss under the intervention.")
SINK_SHARE = Metric(
    "sink_share",
    "fraction",
    "Mean share of a row on the sink, over the queries that see it and do not stand on it; the null mass is part of the whole.",
    range=FRACTION,
)


class ExperimentResult(abc.ABC):
    """A frozen dataclass whose fields are the numbers of an experiment."""

    @property
    @abc.abstractmethod
    def statement(self) -> str:
        """What the numbers say, in a sentence or two."""

    @abc.abstractmethod
    def rows(self) -> Iterator[Row]:
        """Rows of the long table."""

    def to_dict(self) -> dict[str, object]:
        """For JSON: the statement and all fields, with ``None`` for what is not a number."""
        return {"statement": self.statement, **plain(self)}


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses as objects, arrays as lists, heads as ``layer.head``; NaN and infinity are null."""
    if isinstance(value, Head):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (np.ndarray, Tensor)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return number(value) if isinstance(value, float) else value


def number(value: SupportsFloat) -> float | None:
    """A Python number for JSON, or ``None`` for what is not one."""
    converted = float(value)
    return converted if math.isfinite(converted) else None


def bounds(interval: Interval) -> Difference:
    """An interval for a summary."""
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def signed(interval: Interval) -> str:
    """``+0.1031 [+0.0819, +0.1254]``."""
    return f"{interval.mean:+z.4f} [{interval.low:+z.4f}, {interval.high:+z.4f}]"


def head_rows(metric: Metric, heads: Sequence[Head], values: Iterable[float], **columns: Unpack[Coordinates]) -> Iterator[Row]:
    """A row for every head that has the number."""
    for head, value in zip(heads, values, strict=True):
        if number(value) is not None:
            cell: Coordinates = {"module": head.module, "layer": head.layer, "head": head.head}
            yield {**columns, **cell, "metric": metric, "value": float(value)}


def interval_rows(metric: Metric, interval: Interval | None, **columns: Unpack[Coordinates]) -> Iterator[Row]:
    """The mean under the name of the metric, and the ends of its interval under the name with ``_low`` and ``_high``."""
    for bound, value in ({} if interval is None else interval.to_dict()).items():
        yield {**columns, "metric": metric if bound == "mean" else metric.bound(bound), "value": value}
