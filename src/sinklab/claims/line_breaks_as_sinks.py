"""Xiao et al. 2023, Table 1: four line breaks in the place of the first tokens serve as sinks as well as those."""

from __future__ import annotations

from sinklab.claims._streaming import COSTS, DRAWS, MARGIN, draw, keep
from sinklab.jobs.claim import Claim, Difference, Numbers, Part, Scale
from sinklab.registry import claims

__all__ = ["line_breaks_as_sinks"]


def measure(seed: int, scale: Scale) -> Numbers:
    """Losses past twice the trained context, of texts whose first four tokens are their own or line breaks."""
    texts = draw(seed, scale)
    broken = texts.rows.clone()
    broken[:, :4] = texts.loaded.encoder.encode("\n")[0]
    return {
        "no sinks": {"loss": float(texts.losses(keep(0, texts.budget)).mean())},
        "four first tokens": {"loss": float(texts.losses(keep(4, texts.budget)).mean())},
        "four line breaks": {"loss": float(texts.losses(keep(4, texts.budget), broken).mean())},
    }


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
        measure=measure,
        costs=COSTS,
        evidence={
            **DRAWS,
            "tiny": f"{DRAWS['tiny']}. Every training row of this model began with BOS, which the line breaks replace here; "
            "that its sink is BOS's and no place's is seen in re-computed windows, too (claim recomputation_equals_sinks)",
        },
    )
