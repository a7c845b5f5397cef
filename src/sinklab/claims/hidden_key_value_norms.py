"""Hidden, key and value norms: a sink token has a large hidden state, a small key and value, and an angle that attracts."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_massive, has_sink
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Value

__all__ = ["hidden_key_value_norms", "stands_out"]

SMALL = 0.8
"""A norm over the mean of others below which it is called small: a fifth less."""


@claims.register("hidden_key_value_norms")
def hidden_key_value_norms() -> Claim:
    """Keys, values and angles are those of the heads whose mean weight on the first token exceeds 0.3."""
    return Claim(
        statement="The sink token has a large hidden state and a small key and value; queries are drawn by the angle.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 3.1",
        published="LLaMA3-8B: |h_1| 370 where others have 1 to 60; |k_1| 3 to 5 and 20; |v_1| below 1 and 2 to 5.7; cosine "
        "with queries 0.5 and -0.2 in the head shown.",
        variants=(UNCHANGED,),
        checkpoint=OnCheckpoint(about="text"),
        bases=("bos", "no-bos"),
        read_outs=("sinks", "norms"),
        presupposes=(has_sink(),),
        parts=stands_out(BASELINE),
    )


def stands_out(label: str) -> tuple[Part, ...]:
    """The four ways in which the sink token of a model stands out."""
    return (
        has_massive(label),
        Part("its key is small", Value("key_ratio_sink", label), less_than=SMALL),
        Part("its value is small", Value("value_ratio_sink", label), less_than=SMALL),
        Part(
            "queries point to its key more than to others",
            Difference("cosine_first", label, label, other="cosine_other"),
            more_than=0.2,
        ),
    )
