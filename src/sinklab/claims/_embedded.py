"""Embedded models as read-outs see trained ones: the weights that come with the package, and texts that a seed draws."""

from __future__ import annotations

from collections.abc import Mapping

from sinklab.claims._streaming import opened
from sinklab.corpora import resolve_corpus
from sinklab.jobs.checkpoint import Checkpoint
from sinklab.registry import read_outs

__all__ = ["SINGLE", "embedded_model", "numbers_of"]

SINGLE = (
    "one trained model of 1.5 million parameters; a seed is a draw of 100 texts, so intervals are over texts, not trainings"
)
"""Said of every claim that rests on these numbers."""


def embedded_model(name: str, seed: int) -> Checkpoint:
    """An embedded model and rows of held-out Python source, each from a random line on.

    Args:
        name: ``embedded:softmax`` or ``embedded:sigmoid``.
        seed: of the draw of the texts.
    """
    return Checkpoint(opened(name), resolve_corpus("python_source"), seed)


def numbers_of(name: str, seed: int, *wanted: str) -> Mapping[str, float]:
    """What read-outs say of an embedded model on the texts of a seed."""
    model = embedded_model(name, seed)
    numbers: dict[str, float] = {}
    for read_out in wanted:
        numbers |= read_outs[read_out](model)
    return numbers
