"""SGD in the place of Adam, for the claims about what it does to sinks and outliers: three layers of the backcopy lab."""

from __future__ import annotations

import dataclasses

from sinklab.claims.backcopy_dormant import LEARNED, SETTINGS
from sinklab.registry import operations
from sinklab.results.metric import Metric
from sinklab.studies.backcopy.lab import run_backcopy
from sinklab.studies.backcopy.record import NUMBERS
from sinklab_claims.contract.claim import Part, Scale
from sinklab_claims.contract.effect import Numbers, Value

__all__ = ["ADAM", "LAYERS", "SGD", "adam_and_sgd", "learns"]

ADAM, SGD = "adamw", "sgd"

LAYERS = 3
"""Those of the models of Guo et al. 2024 (arXiv 2410.13835) in which they swap the optimiser."""

METRICS = (
    *(NUMBERS[name] for name in ("trigger_excess", "other_excess", "bos_weight", "bos_weight_trigger", "value_ratio")),
    Metric(
        "residual_peak_inside",
        "ratio",
        "Norm of the residual stream at BOS over its mean elsewhere, largest over the layers whose output another reads.",
    ),
)


def adam_and_sgd(seed: int, scale: Scale) -> Numbers:
    """The head that copies, and the residual stream, of a model trained by each from the same initial weights."""
    numbers = {}
    for optimizer in (ADAM, SGD):
        settings = dataclasses.replace(SETTINGS[scale], layers=LAYERS, optimizer=optimizer)
        run = run_backcopy([operations.make("softmax")], [seed], settings).summary["runs"][0]
        numbers[optimizer] = {metric.name: run[metric.name] for metric in METRICS if run[metric.name] is not None}
    return numbers


def learns(optimizer: str) -> Part:
    """Copying is learned, as far as ``backcopy_dormant`` asks for it."""
    return Part(f"copying is learned by {optimizer}", Value("trigger_excess", optimizer), less_than=LEARNED)
