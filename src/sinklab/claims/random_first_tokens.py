"""Random first tokens: one random token in front strengthens the sink on it, two send it to the second."""

from __future__ import annotations

from sinklab.claims._architecture import SINK
from sinklab.jobs.claim import Claim, Difference, Extreme, Part, Variant
from sinklab.registry import claims

__all__ = ["NO_BOS", "random_first_tokens"]

LEAST = 3.0
"""Points of difference that count as one; those published are 9 and 12."""

NO_BOS = Variant("no_bos", {"data.bos": "none", "data.random_positions": None})
"""What is compared with; nothing is changed where rows have no BOS anyway."""

ONE = Variant("random_first", {"data.bos": "none", "data.random_positions": (0, 1)})
TWO = Variant("random_first_two", {"data.bos": "none", "data.random_positions": (0, 2)})


@claims.register("random_first_tokens")
def random_first_tokens() -> Claim:
    """Uniformly drawn tokens in place of the first, or the first two, of every training row; held-out rows stay as they are."""
    return Claim(
        statement="A random first token in every training row strengthens the sink; with two, it moves to the second.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 5",
        published="Sink rate of the first token 18.18 with ordinary rows and 27.03 with one random token; 1.98 with two, and "
        "14.08 of the second token.",
        variants=(NO_BOS, ONE, TWO),
        bases=("no-bos",),
        read_outs=("sinks",),
        presupposes=(
            Part(
                "a sink forms without BOS",
                Extreme("sink_rate_max", (NO_BOS.label, ONE.label, TWO.label)),
                more_than=SINK,
            ),
        ),
        parts=(
            Part("one strengthens it", Difference("sink_rate", ONE.label, NO_BOS.label), more_than=LEAST),
            Part(
                "with two, the second token has more of it than the first",
                Difference("sink_rate_1", TWO.label, TWO.label, other="sink_rate"),
                more_than=LEAST,
            ),
        ),
    )
