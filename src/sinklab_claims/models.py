"""Models that are only read: the embedded ones, larger checkpoints in their place, and texts that a seed draws for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from sinklab.corpora import resolve_corpus
from sinklab.models.embedded import embedded_called, embedded_path
from sinklab.models.loading import LoadedModel, load_model
from sinklab.registry import read_outs
from sinklab_claims.contract.claim import Cost, Scale
from sinklab_claims.contract.trained import Checkpoint

READ_IN_SECONDS: Mapping[Scale, Cost] = {"tiny": "seconds", "small": "seconds"}
"""Costs of a claim about an embedded model on short rows."""

EMBEDDED: Mapping[Scale, str] = {
    "tiny": "one trained model of 1.5 million parameters; a seed is a draw of 100 texts, so intervals are over texts, not "
    "trainings",
    "small": "trainings of 1.5 million parameters on Python source, 5,000 steps; each reads 100 texts of its own",
}
"""Said of every claim that rests on :func:`numbers_of`."""


@functools.lru_cache(maxsize=2)
def opened(name: str) -> LoadedModel:
    """A model that is only read, loaded once."""
    return load_model(name)


def model_of(scale: Scale, seed: int, operation: str = "softmax") -> str:
    """Name of the model that is measured at a scale: at ``small`` that of a training, at others the same for all seeds.

    Raises:
        UnknownNameError: a seed from which no model was trained; the message says how to train one.
    """
    if scale != "small":
        return f"embedded:{operation}"
    name = embedded_called(operation, seed)
    embedded_path(name)  # refused here, before texts are drawn for it
    return name


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
