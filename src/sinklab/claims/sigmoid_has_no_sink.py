"""Sigmoid has no sink: independent weights need none, and the same weights divided by their sum bring it back."""

from __future__ import annotations

from sinklab.claims._architecture import SIGMOID, UNCHANGED, has_no_sink, has_sink, operation
from sinklab.jobs.claim import Claim, Difference, Part
from sinklab.registry import claims

__all__ = ["sigmoid_has_no_sink"]

NORMALISED = operation("sigmoid, normalised", "sigmoid", normalize=True)


@claims.register("sigmoid_has_no_sink")
def sigmoid_has_no_sink() -> Claim:
    """Without normalisation, the rate is that of the rows divided by their sum: the paper's proxy."""
    return Claim(
        statement="Sigmoid attention has no sink at no worse a loss, and has one when its rows are divided by their sum.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Sink rate and validation loss: softmax 18.18 and 3.73, sigmoid 0.44 and 3.70, normalised sigmoid 30.24 and "
        "3.74.",
        variants=(UNCHANGED, SIGMOID, NORMALISED),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=(
            has_no_sink(SIGMOID.label),
            has_sink(NORMALISED.label),
            Part(
                "the loss is no worse",
                Difference("held_out_loss", SIGMOID.label, UNCHANGED.label),
                less_than=0.05,
            ),
        ),
    )
