"""Gu et al. 2024, read as a statement about roles: the sink is neither a position nor a token, but what never changes."""

from __future__ import annotations

from sinklab.claims.fixed_token import FIXED, METRICS_AT, TOKEN
from sinklab.jobs.claim import Claim, Difference, Part, Variant
from sinklab.registry import claims

__all__ = ["sink_is_a_role"]

POINTS = 5.0
"""Of the sink rate, by which the fixed token must exceed the first position."""

OTHER = Variant("another token fixed_second", {"data.bos": "none", "data.fixed_position": 1, "data.fixed_token": TOKEN + 1})


def _moved(label: str, position: int) -> Part:
    return Part(
        f"with {label} the sink is there, and not at position 0",
        Difference(METRICS_AT[position], label, label, other=METRICS_AT[0]),
        more_than=POINTS,
    )


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
        read_outs=("sinks",),
    )
