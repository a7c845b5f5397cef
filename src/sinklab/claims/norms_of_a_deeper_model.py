"""Norms of a deeper model: the hidden states, keys, values and angles of the sink in the embedded softmax model."""

from __future__ import annotations

from sinklab.claims._architecture import has_sink
from sinklab.claims._embedded import COSTS, EVIDENCE, numbers_of
from sinklab.claims.hidden_key_value_norms import stands_out
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Scale
from sinklab_claims.contract.effect import Numbers

__all__ = ["measure", "norms_of_a_deeper_model"]

MODEL = "embedded:softmax"


@claims.register("norms_of_a_deeper_model")
def norms_of_a_deeper_model() -> Claim:
    """What ``hidden_key_value_norms`` says, of six layers of two heads and rotary positions, trained for longer."""
    return Claim(
        statement="The sink token has a large hidden state, a small key and value, and an angle that draws queries, in a model "
        "of six layers.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 3.1",
        published="LLaMA3-8B: |h_1| 370 where others have 1 to 60; |k_1| 3 to 5 and 20; |v_1| below 1 and 2 to 5.7; cosine "
        "with queries 0.5 and -0.2 in the head shown.",
        measure=measure,
        natural_text=True,
        one_model={"tiny": MODEL},
        costs=COSTS,
        presupposes=(has_sink(MODEL),),
        parts=stands_out(MODEL),
        evidence=EVIDENCE,
    )


def measure(seed: int, scale: Scale) -> Numbers:
    """Sinks and norms on the texts of this seed."""
    return {MODEL: numbers_of("softmax", seed, scale, "sinks", "norms")}
