"""Sigmoid has no sink: independent weights need none, and the same weights divided by their sum bring it back."""

from __future__ import annotations

from sinklab.claims._architecture import SIGMOID, UNCHANGED, has_no_sink, has_sink, operation
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Difference

__all__ = ["sigmoid_has_no_sink"]

NORMALISED = operation("sigmoid, normalised", "sigmoid", normalize=True)


@claims.register("sigmoid_has_no_sink")
def sigmoid_has_no_sink() -> Claim:
    """Without normalisation, the paper's rate is that of the rows divided by their sum, and says nothing of how small that is.

    Of weights that sum to a hundredth, a head may have most on the first token and write nothing of it; of weights of a half on
    every key, much of it and no more than of any other. So the rate at which a head does both stands beside it.
    """
    return Claim(
        statement="Sigmoid attention has no sink at no worse a loss, and has one when its rows are divided by their sum.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Sink rate and validation loss: softmax 18.18 and 3.73, sigmoid 0.44 and 3.70, normalised sigmoid 30.24 and "
        "3.74; a rate of the weights themselves is not published.",
        variants=(UNCHANGED, SIGMOID, NORMALISED),
        bases=("no-bos", "bos"),
        read_outs=("sinks", "carried"),
        presupposes=(has_sink(),),
        parts=(
            has_no_sink(SIGMOID.label),
            has_no_sink(SIGMOID.label, "carried_rate"),
            has_sink(NORMALISED.label),
            Part(
                "the loss is no worse",
                Difference("held_out_loss", SIGMOID.label, UNCHANGED.label),
                less_than=0.05,
            ),
        ),
        evidence={
            "small": "Sigmoid without a bias, as in the source, starts with a half on every key and learns worse. The embedded "
            "pair, whose sigmoid starts with rows that sum to one (a bias of minus the logarithm of the context), differs by "
            "0.4 to 1.7 % of the loss, and no training of it has a sink: sigmoid_in_a_deeper_model"
        },
    )
