"""Fixed token: a token that stands at one position of every row takes the sink there, wherever that is."""

from __future__ import annotations

from sinklab.claims._architecture import has_no_sink, has_sink
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Variant

__all__ = ["FIXED", "TOKEN", "fixed", "fixed_token"]

TOKEN = 200
"""Id of a byte that the texts do not contain, or hardly, in the vocabularies of all scales; no special token."""

ORDINALS = ("first", "second", "third")

METRICS_AT = ("sink_rate", "sink_rate_1", "sink_rate_2")
"""Sink rate of each of the three positions."""


def fixed(position: int) -> Variant:
    """The variant in which every row holds :data:`TOKEN` at a position, counted from 0, and has no BOS."""
    changes = {"data.fixed_position": position, "data.fixed_token": TOKEN, "data.random_positions": None}
    return Variant(f"fixed_{ORDINALS[position]}", {"data.bos": "none", **changes})


FIXED = tuple(fixed(position) for position in range(len(ORDINALS)))


@claims.register("fixed_token")
def fixed_token() -> Claim:
    """The same token at the first, second and third position; held-out rows hold it where training rows do."""
    places = range(len(FIXED))
    return Claim(
        statement="A token fixed at the first, second or third position of every row has the sink there and nowhere else.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 5",
        published="Sink rates of the first three tokens: 74.11, 0, 0 with the first fixed; 0, 69.03, 0 with the second; 0, 0, "
        "69.64 with the third.",
        variants=FIXED,
        bases=("no-bos",),
        read_outs=("sinks",),
        parts=(
            *(has_sink(FIXED[at].label, METRICS_AT[at]) for at in places),
            *(has_no_sink(FIXED[at].label, METRICS_AT[other]) for at in places for other in places if other != at),
        ),
    )
