"""Xiao et al. 2023, Figure 1: past the trained length dense attention and a bare window fail, and four sinks do not."""

from __future__ import annotations

from sinklab.claims._streaming import COSTS, DRAWS, LAST, MARGIN, MODELS, LongTexts, at_scale, keep, on_checkpoint
from sinklab.registry import claims
from sinklab.results.metric import LOSS, Metric
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Numbers

__all__ = ["METRICS", "long_streams"]

ANEW = "re-computation, begun as texts are"

METRICS = (
    LOSS,
    Metric("last_loss", "nats", "Loss of the last tokens, at which re-computation is taken too."),
)


def measured(texts: LongTexts) -> Numbers:
    """Losses past twice the trained context, and of the last tokens, where re-computation is taken too.

    A window that is encoded anew begins with BOS where texts do: the model has hardly seen one that does not.
    """
    loss = {
        "dense": texts.losses("full"),
        "no sinks": texts.losses(keep(0, texts.budget)),
        "four sinks": texts.losses(keep(4, texts.budget)),
    }
    numbers = {label: {"loss": float(part.mean()), "last_loss": float(part[:, -LAST:].mean())} for label, part in loss.items()}
    return {**numbers, ANEW: {"last_loss": float(texts.recomputed(with_bos=texts.bos is not None).mean())}}


@claims.register("long_streams")
def long_streams() -> Claim:
    """Four sinks against everything else in Figure 1, at a cache of a quarter of the trained context.

    What is claimed of re-computation, which costs a window for every token, is that it is not missed: sinks may be better.
    """
    return Claim(
        statement="On texts longer than the training, dense attention and a window without the first tokens lose the thread, "
        "and a window of the same size with four first tokens is as good as re-computing the window.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Figure 1 and Table 1",
        published="Perplexity of Llama-2-13B on a book of 65,000 tokens: dense 5641, window 5158, re-computation 5.43, four "
        "first tokens and 1,020 recent ones 5.40.",
        parts=(
            Part("dense attention fails", Difference("loss", "dense", "four sinks"), more_than=MARGIN),
            Part("a window without sinks fails", Difference("loss", "no sinks", "four sinks"), more_than=MARGIN),
            Part(
                "four sinks are no worse than re-computation",
                Difference("last_loss", "four sinks", ANEW),
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
