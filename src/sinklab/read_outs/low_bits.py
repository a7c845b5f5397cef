"""Low bits: what a trained model loses when weights, or weights and activations, are quantised to six bits after training."""

from __future__ import annotations

from sinklab.read_outs.int8 import quantization_gap
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "low_bits"]

GRIDS = ((6, 8), (6, 6))
"""Bits of weights and of activations."""

METRICS = tuple(
    Metric(
        f"w{weights}a{activations}_gap",
        "nats",
        f"Mean next-token loss on held-out text with weights on grids of {2**weights} values and activations on grids of "
        f"{2**activations}, simulated as for int8_gap, less the loss of the model as it is (Bondarenko et al. 2023, arXiv "
        "2306.12929).",
    )
    for weights, activations in GRIDS
)


@read_outs.register("low_bits")
def low_bits(trained: TrainedModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on held-out rows of the length of the training."""
    numbers = {}
    for weights, activations in GRIDS:
        before, after = quantization_gap(trained, weight_bits=weights, activation_bits=activations)
        numbers[f"w{weights}a{activations}_gap"] = after - before
    return numbers
