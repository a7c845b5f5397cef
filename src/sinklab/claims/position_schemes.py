"""Position schemes: the sink on the first token appears whatever tells the model where a token stands."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_sink, position
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim

__all__ = ["position_schemes"]

SCHEMES = {
    "no positions": "no_position",
    "sinusoid": "sinusoid",
    "learned positions": "learned",
    "relative positions": "relative",
    "ALiBi": "alibi",
    "rotary positions": "rotary",
}


@claims.register("position_schemes")
def position_schemes() -> Claim:
    """Six schemes; one of them is the scale's own, and its runs are those of the baseline.

    ``relative`` is the learned table that the paper describes; its release added the number of the bucket itself to the scores
    (``bucket_index``), to which the published 35.53 belongs.
    """
    return Claim(
        statement="The sink appears with every position scheme, and without positions.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 3",
        published="Sink rates: none 20.35, sinusoid 32.73, learned 33.13, relative 35.53, ALiBi 20.78, rotary 18.18.",
        variants=(UNCHANGED, *(position(label, name) for label, name in SCHEMES.items())),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=tuple(has_sink(label) for label in SCHEMES),
    )
