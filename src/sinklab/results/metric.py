"""Metric: what one number is, declared once; units, versions and definitions everywhere else come from here."""

from __future__ import annotations

import dataclasses

__all__ = ["Metric"]


@dataclasses.dataclass(frozen=True)
class Metric:
    """The declaration of one number that sinklab prints or stores.

    Args:
        name: unique in all of sinklab: lower-case words joined by underscores.
        unit: as in the column ``unit`` of the table: percent, fraction, weight, nats, norm, degrees, ….
        text: one sentence: what is averaged over what.
        formula: in words and symbols, where the sentence does not say it all.
        paper: where the definition comes from, with its arXiv number; empty for our own.
        range: smallest and largest value that the definition allows.
        version: raised when the definition changes; numbers of different versions are never merged.
    """

    name: str
    unit: str
    text: str
    formula: str = ""
    paper: str = ""
    range: tuple[float, float] = (float("-inf"), float("inf"))
    version: int = 1
