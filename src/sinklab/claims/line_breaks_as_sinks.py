"""Xiao et al. 2023, Table 1: four line breaks in the place of the first tokens serve as sinks as well as those."""

from __future__ import annotations

from sinklab.claims._streaming import DRAWS, MARGIN, MODELS, NOT_OF_TRAININGS, LongTexts, at_scale, keep, on_checkpoint
from sinklab.errors import DoesNotApply
from sinklab.models.loading import LoadedModel
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, LOSS, Metric
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Numbers, Value

__all__ = ["METRICS", "line_breaks_as_sinks"]

METRICS = (
    LOSS,
    Metric("begins_alike", "fraction", "1 if a token stands in front of every text, else 0.", outcome=True, range=FRACTION),
)

FAILS = Part("a window without sinks fails", Difference("loss", "no sinks", "four first tokens"), more_than=MARGIN)


def measured(texts: LongTexts) -> Numbers:
    """Losses past twice the trained context, of texts whose first four tokens are their own or line breaks."""
    broken = texts.rows.clone()
    broken[:, :4] = _line_break(texts.loaded)
    return {
        "no sinks": {"loss": float(texts.losses(keep(0, texts.budget)).mean())},
        "four first tokens": {
            "loss": float(texts.losses(keep(4, texts.budget)).mean()),
            "begins_alike": float(texts.bos is not None),
        },
        "four line breaks": {"loss": float(texts.losses(keep(4, texts.budget), broken).mean())},
    }


def _line_break(loaded: LoadedModel) -> int:
    """Id of a line break; some tokenizers put a space in front of whatever they are given, so it is the last id."""
    ids = loaded.encoder.encode("\n")
    tokenizer = loaded.tokenizer
    if not ids or tokenizer is None or "\n" not in tokenizer.decode(ids[-1:]):
        raise DoesNotApply("its tokenizer has no token for a line break")
    return ids[-1]


@claims.register("line_breaks_as_sinks")
def line_breaks_as_sinks() -> Claim:
    """The absolute position makes the sink, not the meaning of its token.

    At the scales, where it is known how models were trained, it is about those whose rows did not all begin with one token:
    where they did, it is that token which has the sink, and line breaks take its place.
    """
    return Claim(
        statement="Sinks matter for where they stand and not for what they say: with the first four tokens replaced by line "
        "breaks a window with sinks does as well.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 1",
        published="Perplexity 5.60 with four line breaks, 5.40 with the four first tokens, 5158 with neither: 0.036 nats "
        "apart.",
        presupposes=(
            FAILS,
            Part("rows began with any token", Value("begins_alike", "four first tokens"), less_than=0.5),
        ),
        parts=(
            Part("line breaks restore the loss", Difference("loss", "no sinks", "four line breaks"), more_than=MARGIN),
            Part(
                "they are as good as the first tokens",
                Difference("loss", "four line breaks", "four first tokens"),
                less_than=MARGIN,
            ),
        ),
        measure=at_scale(measured),
        natural_text=True,
        one_model=MODELS,
        checkpoint=OnCheckpoint(
            measure=on_checkpoint(measured),
            presupposes=(FAILS,),
            reads="long",
            remark="Whether BOS stood in front of every row of the training, which decides here, a checkpoint does not say.",
        ),
        costs=NOT_OF_TRAININGS,
        evidence={
            "tiny": f"{DRAWS['tiny']}. Every row of its training began with BOS, which the line breaks replace: they are "
            "no better than no sinks, in three draws by 0.006 to 0.026 nats worse",
        },
    )
