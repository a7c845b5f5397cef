"""What records of several parts of sinklab are made of."""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    "Difference",
    "Refused",
]


class Refused(TypedDict):
    """What stands in place of a section that could not be had."""

    refused: str


class Difference(TypedDict):
    """A mean, and its interval where one can be had."""

    mean: float
    low: float | None
    high: float | None
