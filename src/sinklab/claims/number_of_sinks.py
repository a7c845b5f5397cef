"""Xiao et al. 2023, Table 2: without first tokens a window fails, with four it does not, and eight are no better."""

from __future__ import annotations

from sinklab.claims._streaming import COSTS, DRAWS, MARGIN, MODELS, LongTexts, at_scale, keep, on_checkpoint
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Numbers

__all__ = ["number_of_sinks"]

SINKS = (0, 1, 2, 4, 8)


def measured(texts: LongTexts) -> Numbers:
    """Losses past twice the trained context; every cache holds as many tokens as the others."""
    return {f"{number} sinks": {"loss": float(texts.losses(keep(number, texts.budget)).mean())} for number in SINKS}


@claims.register("number_of_sinks")
def number_of_sinks() -> Claim:
    """Sinks are part of the budget, as in the paper: a cache with more of them holds fewer recent tokens."""
    return Claim(
        statement="At equal cache size four first tokens are enough, and more of them add nothing.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 2",
        published="Perplexity with 0, 1, 2, 4, 8 first tokens: Falcon-7B 17.90, 12.12, 12.12, 12.12, 12.12; MPT-7B 460.29, "
        "14.99, 15.00, 14.99, 14.98; Pythia-12B 21.62, 11.95, 12.09, 12.09, 12.02; Llama-2-7B 3359.95, 11.88, 10.51, 9.59, "
        "9.54.",
        parts=(
            Part("none is too few", Difference("loss", "0 sinks", "4 sinks"), more_than=MARGIN),
            Part("eight are no better than four", Difference("loss", "4 sinks", "8 sinks"), less_than=MARGIN),
        ),
        measure=at_scale(measured),
        natural_text=True,
        one_model=MODELS,
        checkpoint=OnCheckpoint(measure=on_checkpoint(measured), reads="long"),
        costs=COSTS,
        evidence=DRAWS,
    )
