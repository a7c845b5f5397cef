"""Xiao et al. 2023, Table 1: four line breaks in the place of the first tokens serve as sinks as well as those."""

from __future__ import annotations

from sinklab.claims._streaming import COSTS, DRAWS, MARGIN, MODELS, LongTexts, at_scale, keep, on_checkpoint
from sinklab.errors import DoesNotApply
from sinklab.jobs.claim import Claim, Difference, Numbers, OnCheckpoint, Part
from sinklab.models.loading import LoadedModel
from sinklab.registry import claims

__all__ = ["line_breaks_as_sinks"]


def measured(texts: LongTexts) -> Numbers:
    """Losses past twice the trained context, of texts whose first four tokens are their own or line breaks."""
    broken = texts.rows.clone()
    broken[:, :4] = _line_break(texts.loaded)
    return {
        "no sinks": {"loss": float(texts.losses(keep(0, texts.budget)).mean())},
        "four first tokens": {"loss": float(texts.losses(keep(4, texts.budget)).mean())},
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
    """The absolute position makes the sink, not the meaning of its token."""
    return Claim(
        statement="Sinks matter for where they stand and not for what they say: with the first four tokens replaced by line "
        "breaks a window with sinks does as well.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 1",
        published="Perplexity 5.60 with four line breaks, 5.40 with the four first tokens, 5158 with neither: 0.036 nats "
        "apart.",
        presupposes=(
            Part("a window without sinks fails", Difference("loss", "no sinks", "four first tokens"), more_than=MARGIN),
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
        one_model=MODELS,
        checkpoint=OnCheckpoint(measure=on_checkpoint(measured), reads="long"),
        costs=COSTS,
        evidence={
            **DRAWS,
            "tiny": f"{DRAWS['tiny']}. Every training row of this model began with BOS, which the line breaks replace here; "
            "that its sink is BOS's and no place's is seen in re-computed windows, too (claim recomputation_equals_sinks)",
        },
    )
