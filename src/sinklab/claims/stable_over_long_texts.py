"""Xiao et al. 2023, Figure 5: with four sinks the loss does not grow with the length of the text, and without them it does."""

from __future__ import annotations

import torch

from sinklab.claims._streaming import COSTS, DRAWS, MARGIN, MODELS, LongTexts, at_scale, keep, on_checkpoint
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Numbers

__all__ = ["stable_over_long_texts"]

FRESH, SINKS, BARE = "text by itself", "late, four sinks", "late, no sinks"


def measured(texts: LongTexts) -> Numbers:
    """Loss of the same tokens at the start of their texts, read by themselves, and late in one stream of all texts.

    They are those that a full cache has the context of, and from half of it on. Read by itself a text has lost nothing then. In
    a stream all before it has come and gone many times over, and what it sees beside itself are the first tokens of another.
    The texts are joined in one order and in the reverse, behind a first one, and those of the second half are taken.
    """
    first, others = texts.rows[:1], texts.rows[1:]
    front, (number, length) = int(texts.bos is not None), others.shape
    tokens = slice(texts.budget // 2, texts.budget)
    late = number - number // 2

    def of_text(losses: torch.Tensor) -> torch.Tensor:
        return losses.view(-1, length - front)[late:, tokens]

    start, stop = front + tokens.start, front + tokens.stop
    fresh = texts.losses("full", others[:, :stop], first=start)
    found: dict[str, list[torch.Tensor]] = {FRESH: [fresh[late:], fresh.flip(0)[late:]], SINKS: [], BARE: []}
    for order in (others, others.flip(0)):
        stream = torch.cat((first, order[:, front:].reshape(1, -1)), dim=1)
        for label, sinks in ((SINKS, 4), (BARE, 0)):
            found[label].append(of_text(texts.losses(keep(sinks, texts.budget), stream, first=length)))
    return {label: {"loss": float(torch.cat(parts).double().mean())} for label, parts in found.items()}


@claims.register("stable_over_long_texts")
def stable_over_long_texts() -> Claim:
    """The stream is 64 times as long as the training; the published one a thousand times.

    That a token costs the same wherever it stands in a stream follows from how far layers of windows reach, so it is compared
    with the same token at the start of its text.
    """
    return Claim(
        statement="With four sinks and positions inside the cache a token costs no more late in a long stream than at the "
        "start of a text, where nothing has left the cache; without the sinks it costs more.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Figures 3 and 5",
        published="Stable perplexity over more than four million tokens of a hundred joined books, for 13 models of four "
        "families; windows without the first tokens fail as soon as these have left.",
        parts=(
            Part("with sinks a late token costs no more", Difference("loss", SINKS, FRESH), less_than=MARGIN),
            Part("without them it costs more", Difference("loss", BARE, FRESH), more_than=MARGIN),
        ),
        measure=at_scale(measured),
        natural_text=True,
        one_model=MODELS,
        checkpoint=OnCheckpoint(measure=on_checkpoint(measured), reads="long"),
        costs=COSTS,
        evidence=DRAWS,
    )
