"""Weight decay: some of it strengthens the sink, too much removes it."""

from __future__ import annotations

from sinklab.claims._architecture import SINK, UNCHANGED, has_sink
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Peak

__all__ = ["weight_decay"]


def decay(value: float) -> Variant:
    """The variant with so much weight decay."""
    return Variant(f"decay {value:g}", {"optimizer.weight_decay": value})


NONE, ONE, TEN = decay(0.0), decay(1.0), decay(10.0)


@claims.register("weight_decay")
def weight_decay() -> Claim:
    """No decay, the 0.1 of all scales, 1 and 10.

    At the tiny scale, 1 and 10 shrink weights over a run about as much as 0.5 and 5 do in the paper: learning rate times decay,
    summed over the steps, is 3.2 and 32 there, and 4 and 40 in the paper.

    The right end is confounded, in the paper as here: a model that so much decay keeps from learning has no sink either.
    ``held_out_loss`` says how far that goes.
    """
    return Claim(
        statement="The sink grows with weight decay up to a point, and vanishes with too much of it.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 6",
        published="Sink rates: decay 0 15.20, 0.001 15.39, 0.01 15.23, 0.1 18.18, 0.5 41.08, 1 37.71, 2 6.13, 5 0.01; the loss "
        "rises from 3.72 to 5.24.",
        variants=(NONE, UNCHANGED, ONE, TEN),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=(
            Part(
                "the rate is largest in between",
                Peak("sink_rate", (NONE.label, UNCHANGED.label, ONE.label, TEN.label)),
                more_than=SINK,
            ),
        ),
    )
