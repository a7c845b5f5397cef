"""Sun et al. 2024 (arXiv 2402.17762): zeroing massive activations ruins a model, setting them to their mean does nothing."""

from __future__ import annotations

from sinklab.errors import DoesNotApply
from sinklab.models.losses import is_causal_lm
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.studies.causes.massive import SUN, massive_activations
from sinklab.studies.causes.samples import Samples, masked_samples, token_samples
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part
from sinklab_claims.contract.effect import Value
from sinklab_claims.contract.trained import MeasuredModel, gives
from sinklab_claims.variants import UNCHANGED, Fields, of_paper

sun = of_paper("sun2024", "Sun et al. 2024 (arXiv 2402.17762)")

METRICS = (
    Metric("largest", "norm", "Mean over texts of the largest |x| of a layer, in the layer where it is largest."),
    Metric("times_median", "ratio", "Mean over texts of the largest over the median |x|, in the layer where it is largest."),
    Metric("massive", "count", "Pairs of a position and a channel that are massive by the published thresholds."),
    Metric(
        "deviation",
        "fraction",
        "Largest standard deviation over texts of one of them, by its size; 0 where the mean is no edit.",
        over_seeds="max",
    ),
    Metric("zero", "nats", "Change of the loss with all of them set to zero; absent where there are none."),
    Metric("mean", "nats", "Change of the loss with all of them set to their mean; absent where there are none."),
    Metric("control", "nats", "Change of the loss with as many other channels set to zero; absent where there are none."),
)

TEXTS = 32


@gives(*METRICS)
def edited(trained: MeasuredModel) -> dict[str, float]:
    """Massive activations by the published thresholds or, where there are none, by a ratio of 50 alone, and what editing costs.

    All are :data:`METRICS`.
    """
    massive = massive_activations(trained.loaded.model, _samples(trained))
    numbers = {
        "largest": max(peak["value"] for peak in massive.peaks),
        "times_median": max(peak["times_median"] for peak in massive.peaks),
        "massive": float(len(massive.found)) if (massive.least, massive.times_median) == SUN else 0.0,
    }
    if massive.found:
        numbers["deviation"] = max(activation.deviation / abs(activation.value) for activation in massive.found)
    return {**numbers, **{name: edit.loss.mean for name, edit in massive.edits.items()}}


def _samples(trained: MeasuredModel) -> Samples:
    """Held-out rows; of a model that fills gaps, with gaps."""
    groups, loaded = [("held-out", trained.rows(TEXTS))], trained.loaded
    if is_causal_lm(loaded.model):
        return token_samples(groups)
    mask = None if loaded.tokenizer is None else loaded.tokenizer.mask_token_id
    if mask is None:
        raise DoesNotApply("its tokenizer has no token for a gap, so there is no loss to compare")
    return masked_samples(groups, mask)


@claims.register("massive_mean_against_zero")
@sun
def massive_mean_against_zero() -> Fields:
    """Setting massive activations to zero ruins predictions; setting them to their mean does not.

    Only where there are massive activations, and where their mean is an edit: behind a constant BOS it is none.
    """
    return dict(
        where="section 3",
        published="LLaMA2-7B: zeroing four activations ruins the perplexity; with their mean it stays at 5.47.",
        presupposes=(
            Part("there are massive activations", Value("massive", BASELINE), more_than=0.5),
            Part("they vary, so that the mean is an edit", Value("deviation", BASELINE), more_than=1e-4),
        ),
        parts=(
            Part("zero ruins", Value("zero", BASELINE), more_than=0.5),
            Part("the mean does not", Value("mean", BASELINE), less_than=0.02),
        ),
        variants=(UNCHANGED,),
        checkpoint=OnCheckpoint(about="text", reads="context"),
        read_outs=(edited,),
    )
