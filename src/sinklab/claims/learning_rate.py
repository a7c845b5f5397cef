"""Learning rate: at the same number of steps, a larger rate gives a stronger sink."""

from __future__ import annotations

from sinklab.claims._architecture import SINK, UNCHANGED
from sinklab.jobs.claim import Claim, Difference, Extreme, Part, Times, Variant
from sinklab.registry import claims

__all__ = ["learning_rate"]

QUARTER = Variant("rate x1/4", {"optimizer.learning_rate": Times(0.25)})
DOUBLE = Variant("rate x2", {"optimizer.learning_rate": Times(2)})

ALL = (QUARTER.label, UNCHANGED.label, DOUBLE.label)


@claims.register("learning_rate")
def learning_rate() -> Claim:
    """A quarter of the rate and its double against the rate of the scale; everything else, warm-up included, is the same."""
    return Claim(
        statement="At the same number of steps, the sink grows with the learning rate.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 9",
        published="Sink rates after 20,000 steps: 2.90 at a rate of 1e-4, 11.21 at 2e-4, 18.18 at 4e-4, 32.23 at 8e-4.",
        variants=(QUARTER, UNCHANGED, DOUBLE),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(Part("one of the rates gives a sink", Extreme("sink_rate", ALL), more_than=SINK),),
        parts=(
            Part(
                "a quarter of the rate weakens it",
                Difference("sink_rate", QUARTER.label, UNCHANGED.label),
                less_than=-SINK,
            ),
            Part(
                "twice the rate strengthens it",
                Difference("sink_rate", DOUBLE.label, UNCHANGED.label),
                more_than=SINK,
            ),
        ),
    )
