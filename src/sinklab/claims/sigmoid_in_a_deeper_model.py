"""Sigmoid in a deeper model: of two embedded models the one with softmax has a sink and massive activations, the other not."""

from __future__ import annotations

from sinklab.claims._architecture import has_massive, has_no_massive, has_no_sink, has_sink
from sinklab.claims._embedded import COSTS, EVIDENCE, numbers_of
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Scale
from sinklab_claims.contract.effect import Numbers

__all__ = ["measure", "sigmoid_in_a_deeper_model"]

SOFTMAX, SIGMOID = "embedded:softmax", "embedded:sigmoid"


@claims.register("sigmoid_in_a_deeper_model")
def sigmoid_in_a_deeper_model() -> Claim:
    """Two models of six layers that differ in the operation, as the paper's two of a billion parameters do.

    The sigmoid of the embedded model is shifted by ``-log(256)`` (Ramapuram et al. 2024, arXiv 2409.04431); the paper's is not.
    """
    return Claim(
        statement="Of two models that are trained alike, the one with softmax has a sink and massive activations, and the one "
        "with sigmoid attention has neither.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="A billion parameters: sink rates 45.11 and 2.46; |h_1| over the mean of others at most 23.3 and 1.5.",
        measure=measure,
        natural_text=True,
        one_model={"tiny": "embedded:softmax beside embedded:sigmoid"},
        costs=COSTS,
        presupposes=(has_sink(SOFTMAX),),
        parts=(has_massive(SOFTMAX), has_no_sink(SIGMOID), has_no_massive(SIGMOID)),
        evidence={
            "tiny": EVIDENCE["tiny"].replace("one trained model", "one trained model of each operation,"),
            "small": EVIDENCE["small"].replace("trainings", "trainings of each operation,"),
        },
    )


def measure(seed: int, scale: Scale) -> Numbers:
    """Sinks and norms of both on the texts of this seed."""
    return {
        SOFTMAX: numbers_of("softmax", seed, scale, "sinks", "norms"),
        SIGMOID: numbers_of("sigmoid", seed, scale, "sinks", "norms"),
    }
