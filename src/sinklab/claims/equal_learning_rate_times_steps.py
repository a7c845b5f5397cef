"""Equal learning rate times steps: the smaller rate gives the weaker sink, though it has more steps and no worse a loss."""

from __future__ import annotations

from sinklab.claims._architecture import SINK, UNCHANGED
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Changes, Claim, Part, Times, Variant
from sinklab_claims.contract.effect import Difference, Extreme, Slope

__all__ = ["equal_learning_rate_times_steps"]


def _times(rate: float) -> Changes:
    """Warm-up is stretched with the steps, so that the rates of a run sum to the same. In the paper it is 1 % at most, and does
    not matter."""
    steps = Times(1 / rate)
    return {"optimizer.learning_rate": Times(rate), "training.steps": steps, "schedule.warmup_steps": steps}


LARGE = Variant("rate x2, steps x1/2", _times(2))
SMALL = Variant("rate x1/2, steps x2", _times(0.5))
ALL, RATES = (SMALL.label, BASELINE, LARGE.label), (0.5, 1.0, 2.0)

LEAST = 1.5
"""Points a doubling of the rate that count as a difference; the published ones are 3.3 for these three settings."""

NO_WORSE = 0.02
"""Nats by which the held-out loss of the smaller rate may exceed that of the larger."""


@claims.register("equal_learning_rate_times_steps")
def equal_learning_rate_times_steps() -> Claim:
    """Twice the rate for half the steps, and half the rate for twice the steps, beside the scale's own.

    The loss is the control: were the smaller rate behind in its training, its weaker sink would say nothing about the rate.
    """
    return Claim(
        statement="At an equal product of learning rate and steps, a smaller rate gives a weaker sink, at no worse a loss.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 9",
        published="Sink rates and losses: 23.44 and 3.79 at 8e-4 for 10,000 steps, 18.18 and 3.73 at 4e-4 for 20,000, 16.81 "
        "and 3.68 at 2e-4 for 40,000, 6.29 and 3.67 at 1e-4 for 80,000.",
        variants=(LARGE, UNCHANGED, SMALL),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(
            Part(
                "one of them has a sink",
                Extreme("sink_rate", ALL),
                more_than=SINK,
            ),
        ),
        parts=(
            Part("the sink grows with the rate", Slope("sink_rate", ALL, at=RATES), more_than=LEAST),
            Part(
                "the smaller rate has no worse a loss",
                Difference("held_out_loss", SMALL.label, LARGE.label),
                less_than=NO_WORSE,
            ),
        ),
    )
