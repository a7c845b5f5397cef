"""Scales and bases: how large the models of a claim are, what their rows begin with, and where results lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = [
    "BASES",
    "CHECKPOINT",
    "COSTS",
    "RECORDED",
    "ROWS",
    "SCALES",
    "TRAINED_COSTS",
    "Base",
    "Cost",
    "Scale",
    "bases_at",
    "folder_name",
    "folder_names",
    "is_natural",
]

Scale = Literal["tiny", "small", "medium", "60m", "1b"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "medium", "60m", "1b")

CHECKPOINT = "checkpoint"
"""In the place of a scale: nothing is trained, and claims are measured on models as they are."""

RECORDED = (*SCALES, CHECKPOINT)
"""What a record may have for its scale."""

Base = Literal["bos", "no-bos"]
BASES: Mapping[Scale, tuple[Base, ...]] = {
    "tiny": ("bos", "no-bos"),
    "small": ("bos", "no-bos"),
    "medium": ("bos", "no-bos"),
    "60m": ("no-bos",),
    "1b": ("no-bos",),
}
"""What the rows of a scale's models begin with: BOS, which is a place to rest in every row, or nothing of the kind.

With BOS, a bias that could take the sink is not needed; so what a paper found without BOS is tested without.
"""

ROWS: Mapping[str, str] = {"bos": "with BOS", "no-bos": "no BOS"}
"""Bases in words."""


def bases_at(scale: Scale, bases: Sequence[Base] = ()) -> tuple[Base, ...]:
    """Those of a claim's bases that a scale has, in their order; where it has none of them, the first of the scale."""
    return tuple(base for base in bases if base in BASES[scale]) or BASES[scale][:1]


def folder_name(scale: str, base: str | None, own: str | None) -> str:
    """The folder in which the result of a claim lies: the scale, with the base where that is not the claim's own."""
    return scale if base == own else f"{scale}-{base}"


def folder_names(scale: str) -> tuple[str, ...]:
    """Every folder in which results of a scale, or of :data:`CHECKPOINT`, may lie."""
    there = next((bases for known, bases in BASES.items() if known == scale), ())
    return (scale, *(folder_name(scale, base, None) for base in there if len(there) > 1))


Cost = Literal["seconds", "minutes", "hours", "gpu"]
COSTS: tuple[Cost, ...] = ("seconds", "minutes", "hours", "gpu")

TRAINED_COSTS: Mapping[Scale, Cost] = {"tiny": "minutes", "small": "hours", "medium": "gpu", "60m": "gpu", "1b": "gpu"}
"""Cost of a claim about pre-training, at every scale."""


def is_natural(scale: str) -> bool:
    """Whether the models of a scale read text that people wrote; those of the smallest read a synthetic language."""
    return scale != "tiny"
