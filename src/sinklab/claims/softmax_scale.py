"""Softmax scale: rows that sum to less than one have a weaker sink, and rows that sum to more a stronger one."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, WEIGHT, has_sink, operation
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Difference

__all__ = ["softmax_scale"]

SMALL = operation("rows sum to 0.1", "scaled_softmax", alpha=0.1)
LARGE = operation("rows sum to 2", "scaled_softmax", alpha=2.0)


@claims.register("softmax_scale")
def softmax_scale() -> Claim:
    """Scales 0.1 and 2 against 1; each is softmax with another initialisation and learning rate of the output map.

    Judged by the share of a row that the first token has on average; the rates, which the paper reports, are in the table.
    """
    return Claim(
        statement="The sink grows with the number that rows of softmax attention sum to.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Sink rates: rows that sum to 2 29.10, to 1 18.18, to 0.2 9.41, to 0.1 3.59, to 0.05 4.53.",
        variants=(UNCHANGED, SMALL, LARGE),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=(
            Part("0.1 weakens it", Difference("first_attention", SMALL.label, UNCHANGED.label), less_than=-WEIGHT),
            Part("2 strengthens it", Difference("first_attention", LARGE.label, UNCHANGED.label), more_than=WEIGHT),
        ),
    )
