"""Inputs with rotary positions: random tokens keep the sink, and one token repeated has none."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_no_sink, has_sink, position
from sinklab.claims._positions import not_rotary
from sinklab.claims.inputs_by_position import keeps_half
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, OnCheckpoint

__all__ = ["inputs_with_rotary_positions"]

ROTARY = position("rotary positions", "rotary")


@claims.register("inputs_with_rotary_positions")
def inputs_with_rotary_positions() -> Claim:
    """It presupposes a sink with rotary positions, which very small models do not have; nothing follows from losing none.

    Rows of both kinds have nothing in front, as in the paper. The models that it names read BOS in front of natural text.
    """
    return Claim(
        statement="With rotary positions random tokens keep the sink, and one token repeated loses it, both without BOS in "
        "front.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 1 and section 3.3",
        published="Natural, random, repeated: LLaMA2-7B 92.47, 90.13, 0.00; LLaMA3-8B 99.02, 91.23, 0.00; Mistral-7B 97.49, "
        "75.21, 0.00.",
        variants=(UNCHANGED, ROTARY),
        bases=("bos", "no-bos"),
        read_outs=("sinks", "inputs"),
        checkpoint=OnCheckpoint(
            label=ROTARY.label,
            not_about=not_rotary,
            remark="Where BOS carries the sink, both kinds of rows lose it with BOS, and both have it behind BOS.",
        ),
        evidence={
            "small": "BOS carries the sink here: behind BOS random tokens have a sink rate of 12 to 21 %, and one token "
            "repeated of 15 to 19 %, so that what is lost is BOS and not the language"
        },
        presupposes=(has_sink(ROTARY.label),),
        parts=(keeps_half(ROTARY.label), has_no_sink(ROTARY.label, "sink_rate_repeated_no_bos")),
    )
