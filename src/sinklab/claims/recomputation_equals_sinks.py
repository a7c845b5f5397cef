"""Xiao et al. 2023, Table 1: a window encoded anew for every token does as well as one with sinks."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED
from sinklab.claims._first_tokens import LOSS, first_tokens
from sinklab.claims._streaming import LAST, LongTexts, keep, on_checkpoint
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Numbers

__all__ = ["recomputation_equals_sinks"]


def measured(texts: LongTexts) -> Numbers:
    """Losses of the last tokens under the names of the read-out of trained models, in windows that begin as texts do."""
    first = texts.rows.shape[1] - LAST
    return {
        BASELINE: {
            "window_0": float(texts.losses(keep(0, texts.budget), first=first).mean()),
            "window_4": float(texts.losses(keep(4, texts.budget), first=first).mean()),
            "re_computation": float(texts.recomputed(with_bos=texts.bos is not None).mean()),
        }
    }


@claims.register("recomputation_equals_sinks")
def recomputation_equals_sinks() -> Claim:
    """The first token of any window becomes its sink, in models whose rows do not all begin with one token."""
    return Claim(
        statement="Re-computing the keys and values of a bare window for every token gives the loss that four kept first "
        "tokens give: the first token of any window serves as a sink.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Figure 1 and Table 1",
        published="Perplexity 5.43 with re-computation, 5.40 with sinks, 5158 with neither (Llama-2-13B): 0.006 nats apart.",
        presupposes=(
            Part("a window without sinks fails", Difference("window_0", BASELINE, BASELINE, other="window_4"), more_than=LOSS),
        ),
        parts=(
            Part(
                "re-computation and sinks agree",
                Difference("re_computation", BASELINE, BASELINE, other="window_4"),
                more_than=-LOSS,
                less_than=LOSS,
            ),
        ),
        variants=(UNCHANGED,),
        bases=("no-bos",),
        read_outs=("sinks", first_tokens),
        checkpoint=OnCheckpoint(
            measure=on_checkpoint(measured),
            reads="long",
            remark="Windows begin with BOS where the tokenizer puts it in front of a text; whether every row of the "
            "training did, a checkpoint does not say.",
        ),
        costs={"tiny": "minutes", "60m": "gpu", "1b": "gpu"},
    )
