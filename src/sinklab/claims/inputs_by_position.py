"""Inputs by position scheme: random tokens keep the sink; one token repeated keeps it only where positions are absolute."""

from __future__ import annotations

import dataclasses

from sinklab.claims._architecture import UNCHANGED, has_no_sink, has_sink, position
from sinklab.claims._positions import not_learned
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Ratio

__all__ = ["inputs_by_position"]

LEARNED = position("learned positions", "learned")
RELATIVE = position("relative positions", "relative")
OTHERS = (position("no positions", "no_position"), position("ALiBi", "alibi"), RELATIVE)

REPEATED = "sink_rate_repeated_no_bos"


@claims.register("inputs_by_position")
def inputs_by_position() -> Claim:
    """Learned positions against three schemes of which ``repeated_token_laws`` says what one token repeated does to them.

    Rows of both kinds have nothing in front: where the training had BOS, a sink that is at that token and not at its position
    is lost with it, and would be kept by any row that begins with it.
    Rotary positions, with which the paper measured, have a claim of their own, ``inputs_with_rotary_positions``.
    """
    return Claim(
        statement="Random tokens keep the sink; one token repeated keeps it with learned positions, and loses it without "
        "positions, with ALiBi and with relative ones.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 1 and section 3.3",
        published="GPT2-XL, which learns positions: natural 77.00, random 70.29, repeated 62.28; LLaMA3-8B 99.02, 91.23, 0.00. "
        "That the three other schemes lose it is derived, not measured.",
        variants=(UNCHANGED, LEARNED, *OTHERS),
        bases=("no-bos", "bos"),
        read_outs=("sinks", "inputs"),
        checkpoint=OnCheckpoint(
            label=LEARNED.label,
            about="text",
            presupposes=(has_sink(LEARNED.label),),
            parts=(keeps_half(LEARNED.label), has_sink(LEARNED.label, REPEATED)),
            not_about=not_learned,
        ),
        presupposes=(has_sink(LEARNED.label), *(has_sink(variant.label) for variant in OTHERS)),
        parts=(
            keeps_half(LEARNED.label),
            has_sink(LEARNED.label, REPEATED),
            # Equal tokens get weights of the distance alone (repeated_token_laws): 1/t, and less for far ones under ALiBi.
            # What relative positions have learned may favour the farthest key, which is the first, so there it is no theorem.
            *(dataclasses.replace(has_no_sink(of.label, REPEATED), proved=of is not RELATIVE) for of in OTHERS),
        ),
    )


def keeps_half(label: str) -> Part:
    """Random tokens, with nothing in front, keep more than half of the sink rate."""
    says = f"random tokens, with nothing in front, keep most of the sink with {label}"
    return Part(says, Ratio("sink_rate_random_no_bos", label, label, other="sink_rate"), more_than=0.5)
