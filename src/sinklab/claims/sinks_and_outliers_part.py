"""Sun et al. 2026 and Kaul et al. 2024: sinks and outliers are two things; each can be taken away without the other."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_sink, operation
from sinklab.jobs.claim import BASELINE, Claim, Part, Ratio, Value, Variant
from sinklab.registry import claims

__all__ = ["sinks_and_outliers_part"]

SANDWICH = Variant("sandwich norm", {"model.norm_placement": "sandwich"})
PLUS_ONE = operation("softmax plus one", "softmax_plus_one")

OUTLIER = 50.0
"""Largest activation over the median of its hidden state from which there is anything to take away; 1000 is massive."""


@claims.register("sinks_and_outliers_part")
def sinks_and_outliers_part() -> Claim:
    """Sandwich norm takes the outliers and leaves the sink; softmax plus one takes the sink and leaves the outliers."""
    return Claim(
        statement="Sinks and outliers part: a norm behind each sublayer takes outliers away and leaves the sink, softmax plus "
        "one takes the sink away and leaves outliers.",
        source="sun2026",
        reference="Sun et al. 2026 (arXiv 2603.05498); Kaul et al. 2024 (arXiv 2410.17174)",
        published="Sandwich norm: largest activation 3818 to 520, sink ratio 46.0 to 44.7 %. Softmax plus one: share of "
        "first-token maxima 0.333 to 0.022, kurtosis still 245.",
        presupposes=(
            has_sink(),
            Part("the baseline has outliers", Value("massive_ratio", BASELINE), more_than=OUTLIER),
        ),
        parts=(
            Part("sandwich norm halves outliers", Ratio("massive_ratio", SANDWICH.label, BASELINE), less_than=0.5),
            has_sink(SANDWICH.label),
            Part("softmax plus one halves the sink", Ratio("first_attention", PLUS_ONE.label, BASELINE), less_than=0.5),
            Part("softmax plus one leaves outliers", Ratio("massive_ratio", PLUS_ONE.label, BASELINE), more_than=0.5),
        ),
        variants=(UNCHANGED, SANDWICH, PLUS_ONE),
        read_outs=("sinks", "norms"),
    )
