"""Bondarenko et al. 2023, Table 2: models with gated heads lose next to nothing by eight bits, and plain ones much."""

from __future__ import annotations

from sinklab.claims._quantisation import GATED, OUTLIERS, SAME, UNQUANTISABLE
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Difference

__all__ = ["int8_gap_falls"]


@claims.register("int8_gap_falls")
def int8_gap_falls() -> Claim:
    """Weights and activations in eight bits after training, each loss against the same model's in floating point."""
    return Claim(
        statement="Gated heads take away most of what quantisation to eight bits after training costs a plain model.",
        source="bondarenko2023",
        reference="Bondarenko et al. 2023 (arXiv 2306.12929), Table 2",
        published="Perplexity in floating point and in W8A8: OPT-125m 15.84 and 21.18, gated 15.55 and 16.02 (0.29 and 0.03 "
        "nats); BERT-base 4.49 and 1294, gated 4.45 and 4.65.",
        presupposes=(OUTLIERS, UNQUANTISABLE),
        parts=(Part("eight bits cost less", Difference("int8_gap", BASELINE, GATED.label), more_than=SAME),),
        variants=(Variant(BASELINE), GATED),
        read_outs=("int8", "outliers"),
    )
