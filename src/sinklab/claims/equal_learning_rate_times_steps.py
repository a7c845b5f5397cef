"""Equal learning rate times steps: the smaller rate gives the weaker sink, though it has more steps and no worse a loss."""

from __future__ import annotations

from sinklab.claims._architecture import SINK
from sinklab.jobs.claim import Claim, Difference, Extreme, Part, Times, Variant
from sinklab.registry import claims

__all__ = ["equal_learning_rate_times_steps"]

LARGE = Variant("rate x2, steps x1/2", {"optimizer.learning_rate": Times(2), "training.steps": Times(0.5)})
SMALL = Variant("rate x1/2, steps x2", {"optimizer.learning_rate": Times(0.5), "training.steps": Times(2)})

LEAST = 3.0
"""Points of difference that count as one; the published one between the same two settings is 6.6."""

NO_WORSE = 0.02
"""Nats by which the held-out loss of the smaller rate may exceed that of the larger."""


@claims.register("equal_learning_rate_times_steps")
def equal_learning_rate_times_steps() -> Claim:
    """Twice the rate for half the steps against half the rate for twice the steps.

    The loss is the control: were the smaller rate behind in its training, its weaker sink would say nothing about the rate.
    """
    return Claim(
        statement="At an equal product of learning rate and steps, a smaller rate gives a weaker sink, at no worse a loss.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 9",
        published="Sink rates and losses: 23.44 and 3.79 at 8e-4 for 10,000 steps, 18.18 and 3.73 at 4e-4 for 20,000, 16.81 "
        "and 3.68 at 2e-4 for 40,000, 6.29 and 3.67 at 1e-4 for 80,000.",
        variants=(LARGE, SMALL),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(
            Part(
                "one of the two has a sink",
                Extreme("sink_rate", (LARGE.label, SMALL.label)),
                more_than=SINK,
            ),
        ),
        parts=(
            Part(
                "the smaller rate has the weaker sink",
                Difference("sink_rate", SMALL.label, LARGE.label),
                less_than=-LEAST,
            ),
            Part(
                "the smaller rate has no worse a loss",
                Difference("held_out_loss", SMALL.label, LARGE.label),
                less_than=NO_WORSE,
            ),
        ),
    )
