"""Xiao et al. 2023, section 3.2: past the trained length positions must be counted inside the cache and not in the text."""

from __future__ import annotations

from sinklab.claims._streaming import COSTS, DRAWS, MARGIN, MODELS, LongTexts, at_scale, keep, on_checkpoint
from sinklab.registry import claims
from sinklab.results.metric import LOSS, Metric
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Numbers

__all__ = ["METRICS", "position_inside_the_cache"]

METRICS = (LOSS, Metric("loss_within", "nats", "Loss within the trained context, once the cache is full."))


def measured(texts: LongTexts) -> Numbers:
    """Losses within the trained context, once the cache is full, and past twice its length."""
    numbers = {}
    for label, positions in (("inside the cache", "in_cache"), ("in the text", "original")):
        losses = texts.losses(keep(4, texts.budget, positions=positions), first=2 * texts.budget)
        within, past = texts.trained - 2 * texts.budget, 2 * texts.trained - 2 * texts.budget
        numbers[label] = {"loss_within": float(losses[:, :within].mean()), "loss": float(losses[:, past:].mean())}
    return numbers


@claims.register("position_inside_the_cache")
def position_inside_the_cache() -> Claim:
    """The same tokens are seen either way; only the distance to the four sinks differs."""
    return Claim(
        statement="A cache with sinks works past the trained length because positions are counted inside the cache; with "
        "those of the text the distance to the sinks leaves what the model was trained on, and the loss rises.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), section 3.2 and Figure 4",
        published="Named crucial for the method, without a number: nine tokens read, cached tokens 0, 1, 2, 3, 6, 7, 8 stand "
        "at positions 0 to 6 and the next one at 7.",
        parts=(
            Part(
                "past the trained length positions in the text are worse",
                Difference("loss", "in the text", "inside the cache"),
                more_than=MARGIN,
            ),
            Part(
                "within the trained length they make no difference",
                Difference("loss_within", "in the text", "inside the cache"),
                more_than=-MARGIN,
                less_than=MARGIN,
            ),
        ),
        measure=at_scale(measured),
        natural_text=True,
        one_model=MODELS,
        checkpoint=OnCheckpoint(measure=on_checkpoint(measured), reads="long"),
        costs=COSTS,
        evidence=DRAWS,
    )
