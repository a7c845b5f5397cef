"""Sun et al. 2024: zeroing massive activations ruins a model, setting them to their mean does nothing."""

from __future__ import annotations

from sinklab.causes.massive import SUN, massive_activations
from sinklab.causes.samples import token_samples
from sinklab.claims._architecture import UNCHANGED
from sinklab.registry import claims
from sinklab.reproduction.claim import BASELINE, Claim, Part, Value
from sinklab.reproduction.trained import TrainedModel

__all__ = ["edited", "massive_mean_against_zero"]

TEXTS = 32


def edited(trained: TrainedModel) -> dict[str, float]:
    """Massive activations by the published thresholds or, where there are none, by a ratio of 50 alone, and what editing costs.

    ``largest`` and ``times_median``: the largest value, and the largest multiple of the median of its hidden state, over
    layers; ``massive``: how many (position, channel) pairs there are by the published thresholds; ``deviation``: largest
    standard deviation over texts, by the size of the value: 0 where the mean is no edit; ``zero``, ``mean`` and ``control``:
    change of the loss in nats, absent where nothing is found by either.
    """
    found = massive_activations(trained.loaded.model, token_samples([("held-out", trained.rows(TEXTS))]))
    numbers = {
        "largest": max(peak["value"] for peak in found.peaks),
        "times_median": max(peak["times_median"] for peak in found.peaks),
        "massive": float(len(found.found)) if (found.least, found.times_median) == SUN else 0.0,
    }
    if found.found:
        numbers["deviation"] = max(one.deviation / abs(one.value) for one in found.found)
    return {**numbers, **{name: edit.loss.mean for name, edit in found.edits.items()}}


@claims.register("massive_mean_against_zero")
def massive_mean_against_zero() -> Claim:
    """Only where there are massive activations, and where their mean is an edit: behind a constant BOS it is none."""
    return Claim(
        statement="Setting massive activations to zero ruins predictions; setting them to their mean does not.",
        source="sun2024",
        reference="Sun et al. 2024 (arXiv 2402.17762), section 3",
        published="LLaMA2-7B: zeroing four activations ruins the perplexity; with their mean it stays at 5.47.",
        presupposes=(
            Part("there are massive activations", Value("massive", BASELINE), "count", more_than=0.5),
            Part("they vary, so that the mean is an edit", Value("deviation", BASELINE), "fraction", more_than=1e-4),
        ),
        parts=(
            Part("zero ruins", Value("zero", BASELINE), "nats", more_than=0.5),
            Part("the mean does not", Value("mean", BASELINE), "nats", less_than=0.02),
        ),
        variants=(UNCHANGED,),
        read_outs=(edited,),
    )
