"""What a read-out says that it gives, and of which trainings it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sinklab.results.metric import Metric

__all__ = ["gives"]

F = TypeVar("F", bound=Callable[..., Mapping[str, float]])


def gives(*metrics: Metric, of_diverged: bool = False) -> Callable[[F], F]:
    """Mark a function of a trained model with the metrics of its numbers.

    Args:
        of_diverged: it reads the table of a training, and so those too that have left no model.
    """

    def mark(read_out: F) -> F:
        marked: Any = read_out
        marked.metrics, marked.of_diverged = metrics, of_diverged
        return read_out

    return mark
