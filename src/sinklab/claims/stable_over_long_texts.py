"""Xiao et al. 2023, Figure 5: with four sinks the loss does not grow with the length of the text."""

from __future__ import annotations

import torch

from sinklab.claims._streaming import COSTS, DRAWS, MARGIN, MODELS, LongTexts, at_scale, keep, on_checkpoint
from sinklab.jobs.claim import Claim, Difference, Numbers, OnCheckpoint, Part
from sinklab.registry import claims

__all__ = ["stable_over_long_texts"]


def measured(texts: LongTexts) -> Numbers:
    """Loss of the same texts early and late in one stream of all of them.

    The texts are joined in one order and in the reverse order, behind a first one that is not scored, and those at the ends
    of the order are read early in one stream and late in the other: what is compared is the same tokens.
    """
    first, others = texts.rows[:1], texts.rows[1:, texts.bos is not None :]
    number, size = others.shape
    policy = keep(4, texts.budget)
    scored = number // 3
    early, late = [], []
    for order in (others, others.flip(0)):
        losses = texts.losses(policy, torch.cat((first, order.reshape(1, -1)), dim=1), first=first.shape[1])
        by_text = losses.view(number, size)[:, texts.budget + 1 :]  # without tokens that see the text before
        early.append(by_text[:scored].mean())
        late.append(by_text[-scored:].mean())
    return {
        "early": {"loss": float(torch.stack(early).mean())},
        "late": {"loss": float(torch.stack(late).mean())},
    }


@claims.register("stable_over_long_texts")
def stable_over_long_texts() -> Claim:
    """The stream is 64 times as long as the training; the published one a thousand times."""
    return Claim(
        statement="With four sinks and positions inside the cache the loss stays where it is, however long the text.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Figures 3 and 5",
        published="Stable perplexity over more than four million tokens of a hundred joined books, for 13 models of four "
        "families.",
        parts=(
            Part(
                "the same text costs as much late as early",
                Difference("loss", "late", "early"),
                more_than=-MARGIN,
                less_than=MARGIN,
            ),
        ),
        measure=at_scale(measured),
        one_model=MODELS,
        checkpoint=OnCheckpoint(measure=on_checkpoint(measured), reads="long"),
        costs=COSTS,
        evidence=DRAWS,
    )
