"""Embedded models as read-outs see trained ones: the weights that come with the package, and texts that a seed draws."""

from __future__ import annotations

from collections.abc import Mapping

from sinklab.claims._streaming import model_of, opened
from sinklab.corpora import resolve_corpus
from sinklab.registry import read_outs
from sinklab_claims.contract.claim import Cost, Scale
from sinklab_claims.contract.trained import Checkpoint

__all__ = ["COSTS", "EVIDENCE", "embedded_model", "numbers_of"]

EVIDENCE: Mapping[Scale, str] = {
    "tiny": "one trained model of 1.5 million parameters; a seed is a draw of 100 texts, so intervals are over texts, not "
    "trainings",
    "small": "trainings of 1.5 million parameters on Python source, 5,000 steps; each reads 100 texts of its own",
}
"""Said of every claim that rests on these numbers."""

COSTS: Mapping[Scale, Cost] = {"tiny": "seconds", "small": "seconds"}


def embedded_model(operation: str, seed: int, scale: Scale) -> Checkpoint:
    """An embedded model and rows of held-out Python source, each from a random line on.

    Args:
        operation: ``softmax`` or ``sigmoid``.
        seed: of the draw of the texts, and at ``small`` of the training too.
    """
    return Checkpoint(opened(model_of(scale, seed, operation)), resolve_corpus("python_source"), seed)


def numbers_of(operation: str, seed: int, scale: Scale, *wanted: str) -> Mapping[str, float]:
    """What read-outs say of an embedded model on the texts of a seed."""
    model = embedded_model(operation, seed, scale)
    numbers: dict[str, float] = {}
    for read_out in wanted:
        numbers |= read_outs[read_out](model)
    return numbers
