"""Xiao et al. 2023, Table 6: a larger cache does not always lower the loss."""

from __future__ import annotations

from sinklab.claims._streaming import DRAWS, MODELS, NOT_OF_TRAININGS, LongTexts, at_scale, keep, on_checkpoint
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Numbers, Rise

__all__ = ["cache_size_not_monotone"]

PARTS = {"an eighth": 8, "a quarter": 4, "half": 2, "the whole": 1}

LEAST = 0.02
"""Nats. In three of the four published models the loss rises by 0.040 to 0.055 from half of the context to the whole."""


def measured(texts: LongTexts) -> Numbers:
    """Losses past twice the trained context with four sinks; cache and query together fill the part of the context."""
    return {
        label: {"loss": float(texts.losses(keep(4, texts.trained // divisor - 1)).mean())} for label, divisor in PARTS.items()
    }


@claims.register("cache_size_not_monotone")
def cache_size_not_monotone() -> Claim:
    """The largest cache stays inside the trained context, so that what is found is not a failure of positions.

    A model for which every step lowers the loss is no evidence against it, nor are several of one recipe.
    """
    return Claim(
        statement="A larger cache does not always lower the loss: there are models for which a step from an eighth of the "
        "trained context to all of it raises it.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 6",
        published="Perplexity with caches of an eighth, a quarter, half and the whole of the trained context: Falcon-7B 13.61, "
        "12.84, 12.34, 12.84; MPT-7B 14.12, 14.25, 14.33, 14.99; Pythia-12B 13.17, 12.52, 12.08, 12.09; Llama-2-7B 9.73, 9.32, "
        "9.08, 9.59.",
        parts=(Part("a larger cache is worse", Rise("loss", tuple(PARTS)), more_than=LEAST, of_some=True),),
        measure=at_scale(measured),
        natural_text=True,
        one_model=MODELS,
        checkpoint=OnCheckpoint(measure=on_checkpoint(measured), reads="long"),
        costs=NOT_OF_TRAININGS,
        evidence={"tiny": DRAWS["tiny"]},
    )
