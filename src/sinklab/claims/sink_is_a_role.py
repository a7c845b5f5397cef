"""Gu et al. 2024, read as a statement about roles: the sink is neither a position nor a token, but what never changes."""

from __future__ import annotations

from sinklab.claims.bos_removed import no_bos, without_bos
from sinklab.claims.fixed_token import FIXED, METRICS_AT, TOKEN
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Difference, Numbers, Value
from sinklab_claims.contract.trained import Checkpoint

__all__ = ["moved", "sink_is_a_role"]

POINTS = 5.0
"""Of the sink rate, by which the fixed token must exceed the first position."""

SHARE = 0.05
"""Of a row, by which the moved token must exceed the first position."""

OTHER = Variant(
    "another token fixed_second",
    {"data.bos": "none", "data.fixed_position": 1, "data.fixed_token": TOKEN + 1, "data.random_positions": None},
)


def _moved(label: str, position: int) -> Part:
    return Part(
        f"with {label} the sink is there, and not at position 0",
        Difference(METRICS_AT[position], label, label, other=METRICS_AT[0]),
        more_than=POINTS,
    )


def moved(checkpoint: Checkpoint) -> Numbers:
    """Shares of the head that gives BOS most, with BOS where it was and a quarter into the row."""
    return {BASELINE: without_bos(checkpoint)}


@claims.register("sink_is_a_role")
def sink_is_a_role() -> Claim:
    """Positions are changed with one token, and tokens at one position; held-out rows hold them where training rows do."""
    return Claim(
        statement="The sink is the token that stands at one place of every row, wherever that is and whichever token it is.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 5",
        published="With a token fixed at the second or third position, the sink rate there is 69 or 70 %, and 0 at the first.",
        parts=(_moved(FIXED[1].label, 1), _moved(FIXED[2].label, 2), _moved(OTHER.label, 1)),
        variants=(FIXED[1], FIXED[2], OTHER),
        bases=("no-bos",),
        read_outs=("sinks",),
        checkpoint=OnCheckpoint(
            measure=moved,
            parts=(
                Part(
                    "with BOS a quarter into the row the sink is there, and not at position 0",
                    Difference("at_bos_moved", BASELINE, BASELINE, other="at_first_moved"),
                    more_than=SHARE,
                ),
            ),
            presupposes=(Part("a head has its sink on BOS", Value("strongest", BASELINE), more_than=0.3),),
            not_about=no_bos,
            remark="On a checkpoint BOS, which stood first in every row of its training, is moved in the texts that it reads.",
        ),
    )
