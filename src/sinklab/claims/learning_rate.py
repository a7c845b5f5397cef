"""Learning rate: at the same number of steps, a larger rate gives a stronger sink."""

from __future__ import annotations

from sinklab.claims._architecture import SINK, UNCHANGED
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part, Times, Variant
from sinklab_claims.contract.effect import Extreme, Slope

__all__ = ["learning_rate"]

QUARTER = Variant("rate x1/4", {"optimizer.learning_rate": Times(0.25)})
HALF = Variant("rate x1/2", {"optimizer.learning_rate": Times(0.5)})
DOUBLE = Variant("rate x2", {"optimizer.learning_rate": Times(2)})

ALL = (QUARTER.label, HALF.label, UNCHANGED.label, DOUBLE.label)
RATES = (0.25, 0.5, 1.0, 2.0)


@claims.register("learning_rate")
def learning_rate() -> Claim:
    """The four rates of the paper over its third; everything else, warm-up included, is the same.

    The line through all of them must rise by what counts as a sink over their whole range, as the paper's does six times over.
    """
    return Claim(
        statement="At the same number of steps, the sink grows with the learning rate.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 9",
        published="Sink rates after 20,000 steps: 2.90 at a rate of 1e-4, 11.21 at 2e-4, 18.18 at 4e-4, 32.23 at 8e-4.",
        variants=(QUARTER, HALF, UNCHANGED, DOUBLE),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(Part("one of the rates gives a sink", Extreme("sink_rate", ALL), more_than=SINK),),
        parts=(
            Part(
                "it grows with every doubling of the rate", Slope("sink_rate", ALL, at=RATES), more_than=SINK / (len(ALL) - 1)
            ),
        ),
        evidence={
            "small": "The doubled rate learns worse in this recipe, and its models have hardly a sink; over the other three "
            "six seeds show no trend"
        },
    )
